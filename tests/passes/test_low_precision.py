"""cast-mxfp8 and cast-fp8: which products are cast, that casts are nodes that are never kept, and what they cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moegraph.errors import SpecError
from moegraph.graph.precision_cost import decide
from moegraph.graph.program import Port, ports, results
from moegraph.passes.low_precision import products_of
from moegraph.runtime.engine import Engine
from moegraph.verify.compare import sqnr
from moegraph.verify.passes import verify_spec
from tests.everyday import everyday
from tests.small_models import compile_once, compute_step, random_batch, relative_error, small_spec

BF16 = ("precision.compute=bf16", "model.moe.d_ff=32", "model.num_layers=2", "model.dense=null")
MX, FP8 = "precision.mxfp8.experts='on'", "precision.fp8=rowwise"
MX_WGRAD, BLOCKS = "precision.mxfp8.wgrad=mxfp8", "precision.fp8=blockwise"
WGRAD, FUSED = "precision.fp8_wgrad=true", "passes.fuse-experts.enabled=true"
SHORT = ("data.seq_len=8", "train.tokens_per_step=32")
BY_128 = ("model.d_model=128", "model.moe.d_ff=128")
CASES = {
    "mxfp8": ("cast-mxfp8", (MX,)),
    "mxfp8, fused, full recompute": ("cast-mxfp8", (MX, FUSED, "passes.recompute.policy=full")),
    "mxfp8, two ranks": ("cast-mxfp8", (MX, FUSED, "layout={dp: 2, ep: 2, transport: padded, capacity: 2}")),
    "mxfp8, weight gradients too": ("cast-mxfp8", (MX, MX_WGRAD, FUSED)),
    "fp8": ("cast-fp8", (FP8,)),
    "fp8, fused, made again": ("cast-fp8", (FP8, FUSED, "passes.fuse-experts.recompute=true")),
    "fp8, weight gradients too": ("cast-fp8", (FP8, WGRAD, FUSED)),
    "fp8 in blocks": ("cast-fp8", (BLOCKS, *BY_128)),
    "fp8 in blocks, fused, selective recompute": (
        "cast-fp8",
        (BLOCKS, *BY_128, FUSED, "passes.recompute.policy=selective"),
    ),
}


def targets(graph: torch.fx.GraphModule) -> list[str]:
    return [str(node.target).removeprefix("moegraph.").removesuffix(".default") for node in graph.graph.nodes]


SLOW = {
    "mxfp8",
    "mxfp8, weight gradients too",
    "fp8",
    "fp8, fused, made again",
    "fp8 in blocks",
    "fp8 in blocks, fused, selective recompute",
}


@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.slow if c in SLOW else ()) for c in CASES])
def test_verify_proves_it_prints_sqnr_and_sees_a_planted_fault(case: str) -> None:
    name, overrides = CASES[case]
    report = verify_spec(small_spec(*SHORT, *BF16, *overrides))
    (row,) = [row for row in report.rows if row.name == name]
    assert row.ok, row
    assert row.planted_found
    assert row.output_difference > 0
    assert "SQNR" in row.note
    assert "gradient of moe.w_up 2" in row.note  # 20-odd dB
    (folded,) = [row for row in report.rows if row.name == "fold-casts"]
    assert folded.ok, folded
    assert folded.planted_found
    assert folded.rewritten > 0
    assert (folded.tier, folded.output_difference, folded.gradient_difference) == ("exact", 0, 0)


@pytest.mark.parametrize("case", everyday(CASES, first=1))
def test_no_product_is_left_and_nothing_quantised_is_kept_for_backward(case: str) -> None:
    name, overrides = CASES[case]
    unit = next(u for k, u in compile_once(small_spec(*BF16, *overrides)).program.units.items() if k.startswith("moe"))
    forward, backward = unit.graphs["forward"], unit.graphs["backward"]
    kept = [
        node for port, node in zip(ports(forward, "outputs"), results(forward), strict=True) if port.role == "saved"
    ]
    assert not [node for node in kept if node.meta["val"].dtype in (torch.float8_e4m3fn, torch.uint8)]
    found = targets(forward) + targets(backward)
    assert not {"grouped_mm", "grouped_mm_dgrad", "expert_ffn", "expert_ffn_dgrad"} & set(found)
    kind = "mx" if "mx" in name else "fp8_block" if BLOCKS in overrides else "fp8"
    assert f"{kind}_grouped_mm" in found
    assert ("grouped_mm_wgrad_add" in found) == ("weight gradients" not in case)
    assert (f"{kind}_grouped_mm_wgrad" in found) == ("weight gradients" in case)


def test_each_value_is_quantised_once_in_a_direction() -> None:
    unit = compile_once(small_spec(*BF16, FP8, WGRAD, FUSED)).program.units["moe"]
    forward, backward = targets(unit.graphs["forward"]), targets(unit.graphs["backward"])
    assert forward.count("fp8_permute_quantize") == forward.count("fp8_quantize_rows") == 1  # rows, activation
    assert backward.count("fp8_permute_quantize") == backward.count("fp8_quantize_rows") == 1  # gradient, dz
    assert backward.count("fp8_quantize_columns_t") == 4  # gradient and activation, dz and rows


@pytest.mark.parametrize("options", [(MX,), (FP8, WGRAD, FUSED)])
def test_weights_are_quantised_both_ways_round_once_per_optimizer_step(options: tuple[str, ...]) -> None:
    spec = small_spec(*BF16, *options, "layout.microbatches=2")
    engine = Engine(spec, torch.device("cpu"))
    prepare = engine.program.units["moe"].graphs["prepare"]
    assert sum("quantize_rows" in each for each in targets(prepare)) == 4
    graphs = engine.executor.graphs["moe"]
    bound, ran = graphs["prepare"], list[int]()

    def counted(values: Mapping[Port, Tensor]) -> dict[Port, Tensor]:
        ran.append(1)
        return bound(values)

    counted.inputs = bound.inputs  # type: ignore[attr-defined]
    graphs["prepare"] = counted  # type: ignore[assignment]
    blocks = [each for each in engine.program.instances if each.kind == "moe"]
    for step in range(2):
        agreed = engine.compute(random_batch(spec, step))
        assert len(ran) == (step + 1) * len(blocks)
        engine.commit(agreed, 0.1)
    engine.compute(random_batch(spec))
    weights = {port: engine.state.values[blocks[0].parameters[port.name]] for port in bound.inputs}
    used, expected = engine.executor._prepare(blocks[0]), bound(weights)
    assert used.keys() == expected.keys()
    assert all(torch.equal(used[port].view(torch.uint8), expected[port].view(torch.uint8)) for port in used)


@pytest.mark.parametrize("options", [(MX, MX_WGRAD, FUSED), (FP8, WGRAD, FUSED)])
def test_a_whole_step_is_near_that_in_bf16(options: tuple[str, ...]) -> None:
    batch = random_batch(small_spec(*BF16))
    plain, expected = compute_step(small_spec(*BF16), batch)
    low, gradients = compute_step(small_spec(*BF16, *options), batch)
    assert 0 < relative_error(low.loss, plain.loss) < 1e-2
    for name in expected:
        assert sqnr(expected[name], gradients[name]) > 14, name


@pytest.mark.parametrize("options", [(MX,), pytest.param((FP8, FUSED), marks=pytest.mark.slow)])
def test_a32_tokens_that_pad_a_row_are_in_no_loss_metric_or_gradient(options: tuple[str, ...]) -> None:
    spec = small_spec(*BF16, *options)
    batch = random_batch(spec, padding=3)
    tokens = torch.where(batch.document_ids < 0, (batch.tokens + 7) % spec.model.vocab_size, batch.tokens)
    assert not torch.equal(tokens, batch.tokens)
    first, gradients = compute_step(spec, batch)
    second, others = compute_step(spec, replace(batch, tokens=tokens))
    assert torch.equal(first.loss, second.loss)
    assert first.expert_counts is not None
    assert second.expert_counts is not None
    assert torch.equal(first.expert_counts, second.expert_counts)
    assert first.expert_counts.sum() == 2 * 2 * int((batch.document_ids >= 0).sum())  # layers, experts per token
    assert all(torch.equal(gradients[name], others[name]) for name in gradients)


@pytest.mark.slow
@pytest.mark.parametrize("options", [(MX, MX_WGRAD), (FP8, WGRAD, FUSED), (BLOCKS, *BY_128, FUSED)])
def test_a_compiled_step_is_that_of_eager(options: tuple[str, ...]) -> None:
    spec = small_spec(*BF16, "model.attention.num_kv_heads=4", *options)
    compiled = compile_once(spec)
    plain, expected = compute_step(spec, random_batch(spec), compiled=compiled)
    inductor = small_spec(*BF16, "model.attention.num_kv_heads=4", *options, "train.compile=inductor")
    fast, gradients = compute_step(inductor, random_batch(spec), compiled=compiled)
    assert relative_error(fast.loss, plain.loss) < 1e-3
    for name in expected:
        assert sqnr(expected[name], gradients[name]) > 15, name  # rounded elsewhere, so quantised to others


def test_auto_casts_what_the_model_predicts_to_gain_and_nothing_small() -> None:
    large = decide(("forward", 4096, 4096, 65536, 16), 4096)
    assert large.low
    assert large.low_milliseconds < large.bf16_milliseconds
    small = decide(("forward", 2048, 4096, 65536, 16), 2048)
    assert not small.low
    assert "2048" in small.reason
    few = decide(("forward", 4096, 4096, 16, 16), 4096)  # one row per expert: weights are read, and little else
    assert few.bf16_milliseconds > few.low_milliseconds
    record = compile_once(small_spec(*BF16, "precision.mxfp8.experts=auto")).record("cast-mxfp8")
    assert record.count == 0
    assert "measured slower in 8 bits" in record.notes["moe"]


def test_products_are_found_with_their_sizes() -> None:
    joint = compile_once(small_spec(*BF16, FUSED)).record("trace").program.units["moe"].graphs["joint"]
    found = [(p.kind, p.n, p.k, p.side) for p in products_of(joint.graph)]
    assert sorted(found) == [
        ("forward", 96, 32, 32),
        ("input gradient", 32, 32, 32),
        ("input gradient", 32, 64, 32),
        ("weight gradient", 32, 32, 32),
        ("weight gradient", 64, 32, 32),
    ]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((MX,), "needs compute bf16"),
        (("precision.compute=bf16", MX), "whole blocks of 32"),
        ((*BF16, MX, FP8), "both on"),
        ((*BF16, WGRAD), "no effect with precision.fp8 off"),
        ((*BF16, BLOCKS), "whole blocks of 128, and they are 32 and 32"),
        ((*BF16, BLOCKS, *BY_128, WGRAD), "scales in blocks have no weight gradient in FP8"),
        ((*BF16, FP8, "model.moe=null", "model.dense={d_ff: 48}"), "without experts"),
    ],
)
def test_what_does_not_fit_is_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        small_spec(*overrides)
