"""What `auto` takes a cast to cost: that of the graph at the end, in which most quantisers have been folded."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from moegraph.cli.inspect_precision import print_precision
from moegraph.compiled import Compiled
from moegraph.graph.names import display_name
from moegraph.graph.precision_cost import CHIPS, Cast, Decision, decide
from moegraph.passes.cast_fp8 import CastFp8
from moegraph.passes.cast_mxfp8 import CastMxfp8
from tests.small_models import compile_once, small_spec

# One layer of experts whose one side is the shortest that a kernel more is worth.
ROWS, D, F = 2 * 8192, 4096, 2048
WIDE = (
    *("precision.compute=bf16", f"model.d_model={D}", f"model.moe.d_ff={F}", "model.num_layers=1", "model.dense=null"),
    *("model.attention={num_heads: 32, num_kv_heads: 8}", "model.max_seq_len=4096", "data.seq_len=4096"),
    *("train.tokens_per_step=8192", "model.moe.shared.d_ff=2048"),
)
AUTO = "precision.mxfp8={experts: auto, shared: auto}"
FUSED, OFF = "passes.fuse-experts.enabled=true", "passes.fold-casts.enabled=false"
BANDWIDTH = CHIPS["B300"][1]


def traced(*options: str) -> Compiled:
    """A model with nothing cast, by those of the options that matter then."""
    return compile_once(small_spec(*WIDE, *(each for each in options if "precision" not in each and each != OFF)))


def decisions(*options: str) -> dict[str, Decision]:
    """The decision for each product of the experts' block, by its node when nothing is cast."""
    spec, units = small_spec(*WIDE, *options), traced(*options).record("trace").program.units
    unit = next(unit for kind, unit in units.items() if kind.startswith("moe"))
    made_by = CastMxfp8.from_spec(spec) or CastFp8.from_spec(spec)
    assert made_by is not None
    return {display_name(p.node): found for p, found in made_by.decisions(unit.graphs["joint"])}


def milliseconds(bytes_per_element: float, elements: int) -> float:
    return 1e3 * bytes_per_element * elements / BANDWIDTH


def test_at_the_edge_a_product_is_cast_that_would_not_be_if_its_cast_were_a_kernel() -> None:
    """Sides of 2048 were measured slower with the cast in the time."""
    folded, plain = decisions(AUTO), decisions(AUTO, OFF)
    assert folded.keys() == plain.keys()
    changed = {name for name in folded if folded[name].low != plain[name].low}
    assert changed == {"moe.down/grouped_mm", "shared.down/mm"}
    assert all(folded[name].low and "predicted on B300" in folded[name].reason for name in changed)
    assert all(f"a side of {F}" in plain[name].reason for name in changed)
    assert not folded["moe.down/grad.grouped_mm_dgrad"].low  # what it reads is quantised by a kernel more


def test_a_cast_costs_what_the_folded_graph_moves() -> None:
    low, plain = 33 / 32, 2 + 33 / 32
    have = decisions(AUTO)
    act, dz = have["moe.down/grouped_mm"], have["moe.up/grad.grouped_mm_dgrad"]
    assert act.cast_milliseconds == pytest.approx(milliseconds(low, ROWS * F))  # beside bf16
    assert dz.cast_milliseconds == pytest.approx(milliseconds(low, ROWS * 2 * F))
    rows, grad = have["moe.up/grouped_mm"], have["moe.down/grad.grouped_mm_dgrad"]
    assert rows.cast_milliseconds == pytest.approx(milliseconds(2 / 2 + low, ROWS * D))  # one read for two experts
    assert grad.cast_milliseconds == pytest.approx(milliseconds(plain, ROWS * D))  # a router weight has scaled it
    for found in decisions(AUTO, OFF).values():
        elements = sum(cast.elements for cast in found.casts)
        assert found.cast_milliseconds == pytest.approx(milliseconds(plain, elements))
    for name in have:
        assert have[name].low_milliseconds > have[name].cast_milliseconds


def test_fused_experts_write_the_activation_instead_and_its_gradient_beside_if_they_are_cast() -> None:
    on = "precision.mxfp8.experts='on'"
    have = decisions(on, FUSED)
    up, down, dz = (
        have[f"moe.experts/{name}"] for name in ("expert_ffn", "grad.expert_ffn_dgrad", "grad.grouped_mm_dgrad")
    )
    assert [(cast.what, cast.form) for cast in up.casts] == [("rows", "rows"), ("activation", "instead")]
    assert up.cast_milliseconds == pytest.approx(milliseconds(2 / 2 + 33 / 32, ROWS * D))
    assert [cast.form for cast in (*down.casts, *dz.casts)] == ["rows", "beside"]
    auto = decisions("precision.mxfp8.experts=auto", FUSED)["moe.experts/grad.grouped_mm_dgrad"]
    assert [cast.form for cast in auto.casts] == ["kernel"]  # of a gradient that a product in bf16 makes
    apart = decisions(on, FUSED, OFF)["moe.experts/expert_ffn"]
    assert [cast.form for cast in apart.casts] == ["gathered", "kernel"]
    rows = milliseconds(2 / 2 + 2 + 2 + 33 / 32, ROWS * D)
    assert apart.cast_milliseconds == pytest.approx(rows + milliseconds(2 + 33 / 32, ROWS * F))


def test_an_activation_that_backward_computes_again_costs_nothing_in_forward() -> None:
    again = decisions(AUTO, "passes.recompute.policy=selective")["moe.down/grouped_mm"]
    assert ([cast.form for cast in again.casts], again.cast_milliseconds) == (["instead"], 0)


def test_a_fused_product_writes_8_bits_unless_a_scale_is_of_a_whole_row() -> None:
    blocks = decisions("precision.fp8=blockwise", FUSED)
    assert [cast.form for cast in blocks["moe.experts/expert_ffn"].casts] == ["rows", "instead"]
    assert [cast.form for cast in blocks["moe.experts/grad.grouped_mm_dgrad"].casts] == ["beside"]
    fused, apart = (decisions("precision.fp8=rowwise", *options) for options in ((FUSED,), ()))
    assert [cast.form for cast in fused["moe.experts/expert_ffn"].casts] == ["rows", "kernel"]
    assert [cast.form for cast in fused["moe.experts/grad.grouped_mm_dgrad"].casts] == ["kernel"]
    assert [cast.form for cast in apart["moe.down/grouped_mm"].casts] == ["beside"]


@pytest.mark.parametrize("transport", ["padded", "direct"])
def test_rows_that_arrive_in_mxfp8_need_no_cast_and_neither_do_their_gradients(transport: str) -> None:
    layout = f"layout={{dp: 2, ep: 2, transport: {transport}, capacity: 2}}"
    for fused in ((), (FUSED,)):
        found = {}
        for dispatch in ("on", "off"):
            have = decisions(f"precision.mxfp8={{experts: auto, dispatch: '{dispatch}'}}", layout, *fused)
            found[dispatch] = {name: [cast.form for cast in each.casts] for name, each in have.items()}
        up = "moe.experts/expert_ffn" if fused else "moe.up/grouped_mm"
        assert (found["on"][up][0], found["off"][up][0]) == ("arrived", "rows")
        arrived = {name for name, forms in found["on"].items() if "arrived" in forms}
        assert arrived == ({up, "moe.experts/grad.expert_ffn_dgrad"} if fused else {up})  # else a weight has scaled it
        assert not any("arrived" in forms for forms in found["off"].values())


def test_what_takes_less_than_a_few_launches_is_left_alone() -> None:
    short = decide(("forward", 64, 64, 4096, 8), 64, casts=[Cast("rows", 4096 * 64, "made")])
    assert not short.low
    assert short.low_milliseconds < short.bf16_milliseconds
    assert "launches count for more" in short.reason


def test_inspect_prints_how_an_operand_is_quantised_and_what_that_takes(capsys: pytest.CaptureFixture[str]) -> None:
    for options, words, moved in (
        ((), "activation by what makes it, beside bf16", 33 / 32),
        ((OFF,), "rows by a kernel of its own", 2 + 33 / 32),
    ):
        print_precision(replace(traced(), spec=small_spec(*WIDE, AUTO, *options)), as_json=False)
        row = next(line for line in capsys.readouterr().out.splitlines() if " moe.down/grouped_mm " in line)
        assert re.search(rf" {milliseconds(moved, ROWS * F):.3f} +{words} ", row), row
