"""Weight gradients of linear layers in MXFP8 as operators: against float64, and against those of one expert."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moegraph import ops
from moegraph.ops.mx_linear_wgrad import mx_linear_wgrad, mx_quantize_tokens
from moegraph.ops.mx_wgrad import mx_grouped_mm_wgrad
from moegraph.verify.compare import sqnr
from tests.kernels.cases import relative_error

N, K = 144, 160
TOKENS = [1, 32, 200, 256]


def operands(tokens: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(tokens)
    grad = torch.randn(tokens, N) * torch.exp(torch.randn(tokens, 1))
    return grad.bfloat16(), torch.randn(tokens, K).bfloat16()


@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("tokens", TOKENS)
def test_tokens_that_complete_no_block_are_completed_by_zeros(tokens: int, swizzled: bool) -> None:
    """It is the weight gradient of one expert, whose run `mx_quantize_ragged_columns` pads in memory."""
    grad, x = operands(tokens)
    low = [*mx_quantize_tokens(grad, swizzled), *mx_quantize_tokens(x, swizzled)]
    ends = torch.tensor([tokens], dtype=torch.int32)
    (*left, padded), (*right, _) = (ops.mx_quantize_ragged_columns(each, ends, swizzled=swizzled) for each in (grad, x))
    assert torch.equal(low[0].view(torch.uint8), left[0][:tokens].view(torch.uint8))
    have = mx_linear_wgrad(*low, swizzled)
    assert relative_error(have, mx_grouped_mm_wgrad(*left, *right, padded, swizzled)[0].double()) < 3e-3
    restored = [ops.mx_dequantize(data, scale, torch.float32, -2) for data, scale in _plain(grad, x)]
    assert relative_error(have, restored[0].double().t() @ restored[1].double()) < 3e-3
    call = torch.ops.moegraph.mx_linear_wgrad.default
    torch.library.opcheck(call, (*low, swizzled), test_utils="test_faketensor")


def _plain(*given: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Each quantised with the zeros written out."""
    pad = torch.nn.functional.pad
    return [ops.mx_quantize(pad(each, (0, 0, 0, -each.shape[0] % 32)), -2) for each in given]


def test_it_is_near_the_gradient_of_what_was_quantised() -> None:
    """A product of two operands rounded to E4M3; a token that is large spoils its block of 32 and no other."""
    grad, x = operands(4096)
    low = mx_linear_wgrad(*mx_quantize_tokens(grad, True), *mx_quantize_tokens(x, True), True)
    assert 25 < sqnr(grad.double().t() @ x.double(), low.double()) < 32


def test_other_shapes_and_dtypes_are_refused() -> None:
    grad, x = operands(64)
    left, right = mx_quantize_tokens(grad, False), mx_quantize_tokens(x, False)
    with pytest.raises(ValueError, match=r"are not \[T, N\] and \[T, K\]"):
        mx_linear_wgrad(*left, right[0][:32], right[1])
    with pytest.raises(ValueError, match=r"grad must be \[256, 4\] of torch\.uint8, got \[2, 144\]"):
        mx_linear_wgrad(*left, *right, swizzled=True)
    with pytest.raises(ValueError, match=r"x must be torch\.float8_e4m3fn, got torch\.bfloat16"):
        mx_linear_wgrad(*left, x, right[1])
    with pytest.raises(ValueError, match=r"\[2, 32, 160\] is not \[T, K\]"):
        mx_quantize_tokens(x.view(2, 32, K), False)
