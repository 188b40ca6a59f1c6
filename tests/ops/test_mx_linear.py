"""The product of a linear layer in MXFP8 as an operator: on CPU against float64; what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moegraph.ops.mx_linear import mx_linear
from moegraph.ops.mx_scales import swizzle_scales
from tests.kernels.cases import relative_error
from tests.kernels.scaled_cases import mx_quantised, mx_restored

T, K, N = 200, 160, 144


def operands(swizzled: bool) -> tuple[tuple[Tensor, ...], Tensor]:
    """(x, x_scale, weight, weight_scale; the product in float64)."""
    torch.manual_seed(0)
    x, x_scale = mx_quantised(torch.randn(T, K) * torch.exp(torch.randn(T, K)))
    weight, weight_scale = mx_quantised(torch.randn(N, K) * torch.exp(torch.randn(N, K)))
    want = mx_restored(x, x_scale) @ mx_restored(weight, weight_scale).t()
    if swizzled:
        x_scale, weight_scale = swizzle_scales(x_scale), swizzle_scales(weight_scale)
    return (x, x_scale, weight, weight_scale), want


@pytest.mark.parametrize("swizzled", [False, True])
def test_the_product_with_bias(swizzled: bool) -> None:
    p, want = operands(swizzled)
    assert relative_error(mx_linear(*p, None, swizzled), want) < 3e-3
    bias = torch.randn(N).bfloat16()
    assert relative_error(mx_linear(*p, bias, swizzled), want + bias.double()) < 3e-3
    call = torch.ops.moegraph.mx_linear.default
    torch.library.opcheck(call, (*p, bias, swizzled), test_utils="test_faketensor")


def test_other_shapes_and_dtypes_are_refused() -> None:
    (x, x_scale, weight, weight_scale), _ = operands(False)
    with pytest.raises(ValueError, match="a contraction over 144 is not whole blocks of 32"):
        mx_linear(x[:, :144], x_scale, weight[:, :144], weight_scale)
    with pytest.raises(ValueError, match=r"x must be \[256, 8\] of torch\.uint8, got \[200, 5\]"):
        mx_linear(x, x_scale, weight, weight_scale, swizzled=True)
    with pytest.raises(ValueError, match=r"weight must be \[144, 5\] of torch\.uint8, got \[144, 4\]"):
        mx_linear(x, x_scale, weight, weight_scale[:, :4])
    with pytest.raises(ValueError, match=r"are not \[T, K\] and \[N, K\]"):
        mx_linear(x, x_scale, weight[:, :32], weight_scale)
    with pytest.raises(ValueError, match=r"x must be torch\.float8_e4m3fn, got torch\.float32"):
        mx_linear(x.float(), x_scale, weight, weight_scale)
