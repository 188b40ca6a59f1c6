"""save-mxfp8: what is kept for backward is 8.25 bits an element instead of 16, and the loss is not touched."""

from __future__ import annotations

import pytest
import torch

from moegraph.errors import SpecError
from moegraph.graph.program import Unit, ports, results, saved_bytes
from moegraph.verify.compare import sqnr
from moegraph.verify.passes import verify_spec
from tests.small_models import compile_once, compute_step, random_batch, small_spec

BF16 = ("precision.compute=bf16", "model.moe.d_ff=32", "model.num_layers=1", "model.dense=null")
FUSED, SAVED = "passes.fuse-experts.enabled=true", "precision.mxfp8.saved='on'"
MX, FP8 = "precision.mxfp8.experts='on'", "precision.fp8=rowwise"
CASES = {"bf16 products": (), "mxfp8": (MX,), "fp8": (FP8,)}
REMADE = "passes.fuse-experts.recompute=true"


def experts(*options: str) -> Unit:
    """The finished block with experts."""
    units = compile_once(small_spec(*BF16, FUSED, *options)).program.units
    return next(unit for kind, unit in units.items() if kind.startswith("moe"))


def kept(unit: Unit) -> list[tuple[str, tuple[int, ...]]]:
    """dtype and shape of what forward hands to backward."""
    forward = unit.graphs["forward"]
    found = zip(ports(forward, "outputs"), results(forward), strict=True)
    values = [node.meta["val"] for port, node in found if port.role == "saved"]
    return [(str(value.dtype).removeprefix("torch."), tuple(value.shape)) for value in values]


@pytest.mark.parametrize("case", [pytest.param(c, marks=() if c == "mxfp8" else pytest.mark.slow) for c in CASES])
def test_the_pre_activation_is_kept_in_mxfp8_and_in_nothing_else(case: str) -> None:
    rows, width = 64 * 2, 2 * 32
    before, after = experts(*CASES[case]), experts(*CASES[case], SAVED)
    assert kept(before).count(("bfloat16", (rows, width))) == 1
    assert ("bfloat16", (rows, width)) not in kept(after)
    assert kept(after).count(("float8_e4m3fn", (rows, width))) == 1
    assert kept(after).count(("uint8", (rows, width // 32))) == 1
    saved = [saved_bytes(unit.graphs["forward"]) for unit in (before, after)]
    assert saved[0] - saved[1] == rows * width * (2 - 1 - 1 / 32)


def test_the_pre_activation_of_products_in_blocks_is_kept_in_mxfp8_too() -> None:
    after = experts("precision.fp8=blockwise", "model.d_model=128", "model.moe.d_ff=128", SAVED)
    assert ("bfloat16", (128, 256)) not in kept(after)
    assert kept(after).count(("float8_e4m3fn", (128, 256))) == 1


def test_products_in_mxfp8_write_and_read_it_themselves() -> None:
    compiled = compile_once(small_spec(*BF16, FUSED, MX, SAVED))
    joint = compiled.record("save-mxfp8").program.units["moe"].graphs["joint"]
    assert "moegraph.mx_dequantize_rows.default" in [str(node.target) for node in joint.graph.nodes]
    forward, backward = (experts(MX, SAVED).graphs[name].graph for name in ("forward", "backward"))
    assert "moegraph.mx_up_swiglu_saved.default" in [str(node.target) for node in forward.nodes]
    found = [str(node.target) for node in backward.nodes]
    assert "moegraph.mx_dgrad_swiglu_saved.default" in found
    assert not {"moegraph.mx_dequantize_rows.default", "moegraph.mx_quantize_rows.default"} & set(found)


@pytest.mark.parametrize(
    "case", ["mxfp8", *(pytest.param(c, marks=pytest.mark.slow) for c in ("bf16 products", "fp8"))]
)
def test_the_loss_has_the_same_bits_and_gradients_are_near(case: str) -> None:
    batch = random_batch(small_spec(*BF16))
    plain, expected = compute_step(small_spec(*BF16, FUSED, *CASES[case]), batch)
    have, gradients = compute_step(small_spec(*BF16, FUSED, *CASES[case], SAVED), batch)
    assert torch.equal(have.loss, plain.loss)
    assert torch.equal(gradients["head.weight"], expected["head.weight"])
    for name in expected:
        assert sqnr(expected[name], gradients[name]) > 20, name
    assert not torch.equal(gradients["layers.0.moe.w_down"], expected["layers.0.moe.w_down"])


@pytest.mark.parametrize("case", ["mxfp8", pytest.param("bf16 products", marks=pytest.mark.slow)])
def test_verify_proves_it_and_sees_a_planted_fault(case: str) -> None:
    short = ("data.seq_len=8", "train.tokens_per_step=32")
    report = verify_spec(small_spec(*BF16, FUSED, *CASES[case], SAVED, *short))
    (row,) = [row for row in report.rows if row.name == "save-mxfp8"]
    assert row.ok, row
    assert row.planted_found
    assert row.output_difference == 0
    assert 0 < row.gradient_difference < row.tolerance
    assert "gradient of moe.w_up" in row.note
    for folded in (row for row in report.rows if row.name == "fold-casts"):
        assert folded.ok, folded
        assert (folded.tier, folded.output_difference, folded.gradient_difference) == ("exact", 0, 0)


@pytest.mark.slow
def test_a_layer_that_computes_it_again_keeps_none() -> None:
    policy = ("passes.recompute={policy: full, layers: [0]}", "model.num_layers=2")
    record = compile_once(small_spec(*BF16, FUSED, SAVED, *policy)).record("save-mxfp8")
    with_experts = {kind: names for kind, names in record.rewritten.items() if kind.startswith("moe")}
    assert sorted(map(bool, with_experts.values())) == [False, True]
    assert any("policy full recomputes the pre-activation" in note for note in record.notes.values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((FUSED, "precision.compute=fp32"), "needs compute bf16"),
        ((), "is for experts that are one operator"),
        ((FUSED, REMADE), "has no effect with passes.fuse-experts.recompute"),
        ((FUSED, "passes.recompute.policy=full"), "has no effect with passes.recompute.policy full"),
        ((FUSED, "model.moe.d_ff=40"), "whole blocks of 32, and a pre-activation has 2 · 40"),
        (("model.moe=null", "model.dense={d_ff: 48}"), "without experts"),
    ],
)
def test_what_does_not_fit_is_refused(options: tuple[str, ...], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        small_spec(*BF16, SAVED, *options)
