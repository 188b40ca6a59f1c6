"""Projections of attention and shared experts in MXFP8: which products, one cast of what several read, what is kept."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moegraph.cli.inspect_precision import print_precision
from moegraph.errors import SpecError
from moegraph.graph.names import display_name, facts
from moegraph.graph.precision_cost import Cast, decide
from moegraph.graph.program import Unit, ports, results
from moegraph.passes.cast_mxfp8 import CastMxfp8
from moegraph.specs import Spec
from moegraph.verify.compare import sqnr
from moegraph.verify.passes import verify_spec
from tests.small_models import compile_once, compute_step, random_batch, relative_error, small_spec

BF16 = (
    *("precision.compute=bf16", "model.moe.d_ff=32", "model.attention.num_kv_heads=4", "model.num_layers=1"),
    *("model.dense=null", "data.seq_len=8", "train.tokens_per_step=32"),
)
DENSE = "precision.mxfp8={shared: 'on', attention: 'on'}"
ALL = "precision.mxfp8={experts: 'on', shared: 'on', attention: 'on'}"
BIASED = "model.attention.qkv_bias=true"
SLOW = pytest.mark.slow
LINEAR = ["attention.q", "attention.k", "attention.v", "attention.output", "shared.up", "shared.down"]
# One layer with attention of which only k and v are narrow, and an ordinary feed-forward that is never cast.
WIDE = (
    *("precision.compute=bf16", "model.moe=null", "model.dense={d_ff: 8192}", "model.num_layers=1"),
    *("model.d_model=4096", "model.attention={num_heads: 32, num_kv_heads: 8}", "model.max_seq_len=4096"),
    *("data.seq_len=4096", "train.tokens_per_step=8192"),
)


def moe(spec: Spec) -> Unit:
    return next(unit for kind, unit in compile_once(spec).program.units.items() if kind.startswith("moe"))


def calls(module: torch.fx.GraphModule, operator: str) -> list[str]:
    """The layer nodes that calls of an operator belong to, in order."""
    return [facts(n)["layer"] for n in module.graph.nodes if str(n.target) == f"moegraph.{operator}.default"]


def test_every_projection_is_cast_forward_and_backward_and_q_k_and_v_read_one_quantised_x() -> None:
    unit = moe(small_spec(*BF16, BIASED, DENSE))
    forward, backward = unit.graphs["forward"], unit.graphs["backward"]
    assert calls(forward, "mx_linear") == LINEAR
    assert sorted(calls(backward, "mx_linear")) == sorted(LINEAR)
    assert calls(forward, "mx_quantize_rows") == ["attention.q", "attention.output", "shared.up"]
    assert calls(forward, "swiglu_kept_quantized") == calls(backward, "swiglu_backward_quantized") == ["shared.act"]
    assert len(calls(backward, "mx_quantize_rows")) == 5  # gradients of q, k and v are three
    assert sorted(calls(unit.graphs["prepare"], "mx_quantize_rows")) == sorted(2 * LINEAR)
    assert calls(unit.graphs["evaluate"], "mx_linear") == LINEAR
    plain = [facts(n)["layer"] for n in forward.graph.nodes if "aten.mm" in str(n.target)]
    assert plain == ["moe.router"]  # and experts, norms and the core of attention are in bf16 as well
    assert len(calls(forward, "grouped_mm")) == 2


def test_weight_gradients_are_cast_as_well_if_asked_for_and_x_is_quantised_along_tokens_once() -> None:
    unit = moe(small_spec(*BF16, "precision.mxfp8={shared: 'on', attention: 'on', wgrad: mxfp8}"))
    late = unit.graphs["backward_weight"]
    assert sorted(calls(late, "mx_linear_wgrad")) == sorted(LINEAR)
    quantised = calls(late, "mx_quantize_tokens")
    assert sum(layer in ("attention.q", "attention.k", "attention.v") for layer in quantised) == 3 + 1  # x is one
    assert len(quantised) == 6 + 4
    for graph in ("forward", "backward"):
        kept = [facts(n)["layer"] for n in unit.graphs[graph].graph.nodes if "aten.mm" in str(n.target)]
        assert set(kept) == {"moe.router"}
    forward = unit.graphs["forward"]
    saved = [n for p, n in zip(ports(forward, "outputs"), results(forward), strict=True) if p.role == "saved"]
    assert not [display_name(n) for n in saved if n.meta["val"].dtype in (torch.float8_e4m3fn, torch.uint8)]


@pytest.mark.parametrize("policy", [pytest.param("none", marks=SLOW), "selective", pytest.param("full", marks=SLOW)])
@pytest.mark.parametrize("fused", ["true", pytest.param("false", marks=SLOW)])
def test_nothing_quantised_is_kept_and_weights_are_quantised_twice_whatever_is_recomputed(
    policy: str, fused: str
) -> None:
    chosen = (f"passes.recompute.policy={policy}", f"passes.fuse-experts.enabled={fused}")
    unit = moe(small_spec(*BF16, ALL, *chosen))
    forward = unit.graphs["forward"]
    kept = [n for p, n in zip(ports(forward, "outputs"), results(forward), strict=True) if p.role == "saved"]
    assert not [display_name(n) for n in kept if n.meta["val"].dtype in (torch.float8_e4m3fn, torch.uint8)]
    prepare = unit.graphs["prepare"]
    assert len(calls(prepare, "mx_quantize_rows")) == 2 * (6 + 2)
    assert len(set(results(prepare))) == len(results(prepare)) == 4 * (6 + 2)
    weights = {n for g in ("forward", "backward") for n in unit.graphs[g].graph.nodes if "prepared" in display_name(n)}
    for graph in ("forward", "backward"):
        read = [n.args[0] for n in unit.graphs[graph].graph.nodes if "quantize" in str(n.target)]
        assert not weights.intersection(read)


@pytest.mark.parametrize(
    "overrides",
    [
        (BIASED, DENSE),
        pytest.param((ALL, "passes.recompute.policy=selective"), marks=SLOW),
        pytest.param((ALL, BIASED, "precision.mxfp8.wgrad=mxfp8"), marks=SLOW),
        pytest.param((ALL, "layout={dp: 2, ep: 2, transport: padded, capacity: 2}"), marks=SLOW),
        pytest.param(
            (ALL, "layout={pp: 2, microbatches: 4, schedule: 1f1b}", "model.num_layers=2"),
            marks=SLOW,
        ),
    ],
)
def test_verify_proves_it_with_the_routers_choices_held_fixed(overrides: tuple[str, ...]) -> None:
    report = verify_spec(small_spec(*BF16, *overrides))
    (row,) = [row for row in report.rows if row.name == "cast-mxfp8"]
    assert row.ok, row
    assert row.planted_found
    assert row.output_difference > 0
    assert "gradient of attention.q.weight" in row.note
    assert report.ok


@pytest.mark.slow
@pytest.mark.parametrize("wgrad", ["bf16", "mxfp8"])
def test_a_whole_step_is_near_that_in_bf16(wgrad: str) -> None:
    batch = random_batch(small_spec(*BF16))
    plain, expected = compute_step(small_spec(*BF16, BIASED), batch)
    low, gradients = compute_step(small_spec(*BF16, BIASED, DENSE, f"precision.mxfp8.wgrad={wgrad}"), batch)
    assert 0 < relative_error(low.loss, plain.loss) < 1e-2
    for name in ("layers.0.attention.v.weight", "layers.0.attention.output.weight", "layers.0.shared.w_down"):
        assert sqnr(expected[name], gradients[name]) > 12, name


def test_auto_casts_narrow_projections_where_their_rows_are_quantised_already() -> None:
    assert not decide(("forward", 1024, 4096, 65536, 1), 1024).low
    assert decide(("forward", 1024, 4096, 65536, 1), 1024, casts=[Cast("rows", 65536 * 4096, "made")]).low
    spec = small_spec(*WIDE, "precision.mxfp8.attention=auto")
    joint = next(u for k, u in compile_once(spec).record("trace").program.units.items() if "dense" in k).graphs["joint"]
    made_by = CastMxfp8.from_spec(spec)
    assert made_by is not None
    found = {display_name(p.node): (p.kind, d) for p, d in made_by.decisions(joint)}
    low = {(name.split("/")[0], kind) for name, (kind, d) in found.items() if d.low}
    forward = {(f"attention.{name}", "forward") for name in ("q", "k", "v", "output")}
    assert low == forward | {("attention.q", "input gradient"), ("attention.output", "input gradient")}
    kind, narrow = found["attention.k/mm"]
    assert kind == "forward"
    assert "quantised already" in narrow.reason
    assert sum(kind == "weight gradient" and not d.low for kind, d in found.values()) == 4


def test_inspect_prints_every_product_with_its_decision_times_and_reason(capsys: pytest.CaptureFixture[str]) -> None:
    traced = compile_once(small_spec(*BF16, BIASED))  # before any cast
    asking = small_spec(*BF16, BIASED, "precision.mxfp8.shared='on'")
    print_precision(replace(traced, spec=asking), as_json=False)
    rows = capsys.readouterr().out.splitlines()
    up = next(row for row in rows if " shared.up/mm " in row)
    assert "forward" in up
    assert "mxfp8" in up
    assert "the spec asks for it" in up
    query = next(row for row in rows if " attention.q/addmm " in row)
    assert "bf16" in query
    assert "precision.mxfp8.attention is off" in query
    assert not [row for row in rows if "router" in row]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("precision.compute=fp32", "precision.mxfp8.attention='on'"), "needs compute bf16"),
        (("precision.compute=bf16", "precision.mxfp8.attention='on'"), "whole blocks of 32, and they are 32, 16"),
        (("precision.compute=bf16", "precision.mxfp8.shared='on'"), "whole blocks of 32, and they are 32, 16"),
        ((*BF16, "precision.mxfp8.shared=auto", "model.moe.shared=null"), "a model without shared experts"),
        ((*BF16, "precision.mxfp8.shared=auto", "precision.fp8=rowwise"), "one is a format of Hopper"),
    ],
)
def test_what_does_not_fit_is_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        small_spec(*overrides)
