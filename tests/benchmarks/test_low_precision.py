"""The block in FP8 is the block in bf16 up to the noise of FP8, forward and backward."""

from __future__ import annotations

import pytest
import torch

from moegraph.benchmarks.blocks import fused
from moegraph.benchmarks.candidate import Candidate
from moegraph.benchmarks.inputs import make_inputs, make_weights
from moegraph.benchmarks.layer import PRECISIONS
from moegraph.benchmarks.low_precision import Fp8, Fp8Wgrad, fp8_layer, quantize_weights
from moegraph.benchmarks.reference import measure_errors
from moegraph.benchmarks.results import Row, Timing
from moegraph.benchmarks.shapes import Shape

CPU = torch.device("cpu")
SHAPE = Shape(tokens=200, d_model=64, d_ff=64, experts=4, top_k=2, skew=1.0)


@pytest.mark.parametrize("name", PRECISIONS)
def test_every_value_has_the_noise_of_fp8_and_no_more(name: str) -> None:
    """About 24 dB; a wrong operand or scale anywhere gives 0 dB, and bf16 itself 48."""
    weights, inputs = make_weights(SHAPE, torch.bfloat16, CPU), make_inputs(SHAPE, torch.bfloat16, CPU)[0]
    block = PRECISIONS[name](compiled=False)
    have = Candidate(block, SHAPE, *weights).run(inputs)
    errors = measure_errors(have, inputs, *weights, SHAPE.top_k)
    assert errors.relative.keys() == {"out", "dx", "dlogits", "dw_up", "dw_down"}
    for value, error in errors.relative.items():
        assert 0.02 < error < 0.1, value


def test_weight_gradients_in_bf16_are_those_of_the_same_activations() -> None:
    """Only the products in front of them are in FP8: less noise than with all in FP8."""
    weights, inputs = make_weights(SHAPE, torch.bfloat16, CPU), make_inputs(SHAPE, torch.bfloat16, CPU)[0]
    errors = {}
    for name, block in {"fp8": Fp8, "fp8-wgrad": Fp8Wgrad}.items():
        have = Candidate(block(compiled=False), SHAPE, *weights).run(inputs)
        errors[name] = measure_errors(have, inputs, *weights, SHAPE.top_k).relative
    for value in ("dw_up", "dw_down"):
        assert errors["fp8"][value] < errors["fp8-wgrad"][value]
    assert errors["fp8"]["dx"] == errors["fp8-wgrad"]["dx"]


def test_numbers_that_fp8_holds_come_out_as_from_bf16() -> None:
    """Magnitudes of x and of the weights are all the same: only the activation is rounded, one operand of two."""
    torch.manual_seed(0)
    w_up, w_down = torch.randn(3, 32, 16).sign().bfloat16(), torch.randn(3, 16, 16).sign().bfloat16()
    x, logits = torch.randn(40, 16).sign().bfloat16() * 0.25, torch.randn(40, 3)
    want = fused(x, logits, w_up, w_down, 2).float()
    have = fp8_layer(x, logits, w_up, w_down, quantize_weights(w_up, w_down), 2).float()
    assert (have - want).norm() < 0.04 * want.norm()


def test_other_dtypes_are_refused() -> None:
    w_up, w_down = torch.randn(2, 8, 5), torch.randn(2, 5, 4)
    with pytest.raises(ValueError, match=r"x must be bf16, got torch\.float32"):
        fp8_layer(torch.randn(3, 6), torch.randn(3, 2), w_up, w_down, quantize_weights(w_up, w_down), 1)


def test_rows_of_low_precision_may_be_less_right_but_not_wrong() -> None:
    row = Row("fp8", error={"out": 0.1}, low_precision=True, forward=Timing(4.0, 4.0), forward_cast=Timing(1.0, 1.0))
    assert row.sqnr == {"out": pytest.approx(20.0)}
    assert row.cast_share("forward") == 0.25
    assert row.cast_share("forward_backward") is None
    assert not row.wrong()
    assert Row("bf16", error={"out": 0.1}).wrong() == ["out 1.0e-01"]
    assert Row("fp8", error={"out": 0.2}, low_precision=True).wrong() == ["out 2.0e-01"]
