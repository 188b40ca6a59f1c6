"""The weight gradient of a linear layer with MXFP8 operands, quantised along tokens; for Blackwell.

    mx_quantize_tokens   a scale for 32 tokens of a column; zeros complete the last block
    mx_linear_wgrad      dW = dequantised gradᵀ · dequantised x     [N, K] bf16

Both operands have their contraction, over tokens, first. Data is float8_e4m3fn, grad [T, N] and x [T, K]; scales are
uint8, plain or `swizzled`, both operands' alike:

    plain      grad_scale [⌈T/32⌉, N]                    x_scale [⌈T/32⌉, K]
    swizzled   grad_scale [128 · ⌈N/128⌉, 4 · ⌈T/128⌉]   x_scale [128 · ⌈K/128⌉, 4 · ⌈T/128⌉]   of the transposed scales

It is `mx_grouped_mm_wgrad` of one expert whose rows all exist, so that no row has to be moved to pad a run. On
Blackwell it runs on that kernel, which reads zeros past the last token; elsewhere it is emulated, as `mx_backend` says
of N and K. Nothing here has a gradient.

Legend: T tokens, N and K the sizes of a weight.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moegraph.ops import scaled_reference as reference
from moegraph.ops.mx_format import BLOCK, check_mx_input, mx_dequantize, mx_quantize
from moegraph.ops.mx_mm import uses_mx_kernels
from moegraph.ops.mx_scales import TILE, swizzle_scales, unswizzle_scales
from moegraph.ops.quantize import uses_kernels
from moegraph.ops.scaled_mm import check_operand


def _scale_shape(shape: torch.Size, swizzled: bool) -> tuple[int, int]:
    tokens, width = shape
    if swizzled:
        return TILE * -(-width // TILE), TILE // BLOCK * -(-tokens // TILE)
    return -(-tokens // BLOCK), width


def _check_tokens(x: Tensor) -> None:
    check_mx_input(x, None)
    if x.dim() != 2:
        raise ValueError(f"mx_quantize_tokens: {list(x.shape)} is not [T, K]")


@torch.library.custom_op("moegraph::mx_quantize_tokens", mutates_args=())
def mx_quantize_tokens(x: Tensor, swizzled: bool) -> tuple[Tensor, Tensor]:
    """x [T, K] bf16, fp16 or fp32 → (data [T, K], scale [⌈T/32⌉, K], or swizzled). Raises ValueError for another dtype
    and other dimensions."""
    _check_tokens(x)
    if uses_kernels(x):
        from moegraph.kernels import mx_quantize as kernels

        found = kernels.mx_quantize(x.contiguous(), None, rows=False, columns=True, swizzled=swizzled)
        assert found.column_data is not None
        assert found.column_scale is not None
        return found.column_data, found.column_scale
    data, scale = mx_quantize(F.pad(x, (0, 0, 0, -x.shape[0] % BLOCK)), -2)
    return data[: x.shape[0]].contiguous(), swizzle_scales(scale.t()) if swizzled else scale


@mx_quantize_tokens.register_fake
def _(x: Tensor, swizzled: bool) -> tuple[Tensor, Tensor]:
    _check_tokens(x)
    scale = x.new_empty(_scale_shape(x.shape, swizzled), dtype=torch.uint8)
    return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), scale


def _dequantised(data: Tensor, scale: Tensor, swizzled: bool) -> Tensor:
    tokens, width = data.shape
    if swizzled:
        scale = unswizzle_scales(scale, width, -(-tokens // BLOCK)).t()
    padded = F.pad(data.view(torch.uint8), (0, 0, 0, -tokens % BLOCK)).view(torch.float8_e4m3fn)
    return mx_dequantize(padded, scale, reference.wide_dtype(data.device), -2)


def _check(grad: Tensor, grad_scale: Tensor, x: Tensor, x_scale: Tensor, swizzled: bool) -> None:
    if grad.dim() != 2 or x.dim() != 2 or grad.shape[0] != x.shape[0]:
        raise ValueError(f"mx_linear_wgrad: {list(grad.shape)} and {list(x.shape)} are not [T, N] and [T, K]")
    for name, data, scale in (("grad", grad, grad_scale), ("x", x, x_scale)):
        check_operand(f"mx_linear_wgrad: {name}", data, scale, _scale_shape(data.shape, swizzled), torch.uint8)


@torch.library.custom_op("moegraph::mx_linear_wgrad", mutates_args=())
def mx_linear_wgrad(grad: Tensor, grad_scale: Tensor, x: Tensor, x_scale: Tensor, swizzled: bool = False) -> Tensor:
    """grad [T, N] and x [T, K] FP8 with uint8 scales along tokens → dW [N, K] bf16.

    Raises ValueError for other shapes and dtypes of data and scales.
    """
    _check(grad, grad_scale, x, x_scale, swizzled)
    if uses_mx_kernels(grad, grad.shape[1], x.shape[1]):
        from moegraph.kernels import mx_wgrad

        if not swizzled:
            grad_scale, x_scale = swizzle_scales(grad_scale.t()), swizzle_scales(x_scale.t())
        ends = torch.full((1,), TILE * -(-grad.shape[0] // TILE), dtype=torch.int32, device=grad.device)
        tensors = [t.contiguous() for t in (grad, grad_scale, x, x_scale, ends)]
        return mx_wgrad.mx_wgrad(*tensors)[0]
    out = _dequantised(grad, grad_scale, swizzled).t() @ _dequantised(x, x_scale, swizzled)
    return out.to(torch.bfloat16)


@mx_linear_wgrad.register_fake
def _(grad: Tensor, grad_scale: Tensor, x: Tensor, x_scale: Tensor, swizzled: bool = False) -> Tensor:
    _check(grad, grad_scale, x, x_scale, swizzled)
    return x.new_empty(grad.shape[1], x.shape[1], dtype=torch.bfloat16)
