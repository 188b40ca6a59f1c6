"""The weight gradient of MXFP8 operands, each expert's run of rows its own contraction; for Blackwell.

    dW[e] = dequantised gradᵀ[:, run e] · dequantised rows[run e, :]     [E, N, K] bf16

Data is what `mx_quantize_ragged_columns` makes: float8_e4m3fn [P, N] and [P, K] with every expert's run padded by zeros
to a multiple of 128 rows, a scale for 32 rows of a column, and `offsets` [E] int32, the ends of the padded runs. Scales
come plain or `swizzled`, both operands' alike:

    plain      grad_scale [P/32, N]                rows_scale [P/32, K]
    swizzled   grad_scale [128 · ⌈N/128⌉, P/32]    rows_scale [128 · ⌈K/128⌉, P/32]    (`swizzle_column_scales`)

What pads a run is zero in both operands, so it adds nothing; rows past the last offset are not read, and an expert
without rows has a gradient of zero. Where it runs is what `mx_backend` says of N and K; emulated, on CUDA it waits for
the device. Nothing here has a gradient.

Legend: P padded rows, E experts, N and K the sizes of a weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moegraph.ops import scaled_reference as reference
from moegraph.ops.mx_format import mx_dequantize
from moegraph.ops.mx_mm import uses_mx_kernels
from moegraph.ops.mx_scales import TILE, swizzle_column_scales, unswizzle_column_scales
from moegraph.ops.scaled_mm import check_operand


def _check(grad: Tensor, grad_scale: Tensor, rows: Tensor, rows_scale: Tensor, swizzled: bool) -> None:
    if grad.dim() != 2 or rows.dim() != 2 or grad.shape[0] != rows.shape[0] or grad.shape[0] % TILE:
        raise ValueError(
            f"mx_grouped_mm_wgrad: {list(grad.shape)} and {list(rows.shape)} are not [P, N] and [P, K], P % {TILE} = 0"
        )
    blocks = grad.shape[0] // reference.MX_BLOCK
    for name, data, scale in (("grad", grad, grad_scale), ("rows", rows, rows_scale)):
        width = data.shape[1]
        shape = (TILE * -(-width // TILE), blocks) if swizzled else (blocks, width)
        check_operand(f"mx_grouped_mm_wgrad: {name}", data, scale, shape, torch.uint8)


@torch.library.custom_op("moegraph::mx_grouped_mm_wgrad", mutates_args=())
def mx_grouped_mm_wgrad(
    grad: Tensor, grad_scale: Tensor, rows: Tensor, rows_scale: Tensor, offsets: Tensor, swizzled: bool = False
) -> Tensor:
    """grad [P, N] and rows [P, K] FP8 with uint8 scales, offsets [E] int32 → dW [E, N, K] bf16.

    Raises ValueError for other shapes and dtypes; that offsets are multiples of 128 is not checked.
    """
    _check(grad, grad_scale, rows, rows_scale, swizzled)
    n, k = grad.shape[1], rows.shape[1]
    if uses_mx_kernels(grad, n, k):
        from moegraph.kernels import mx_wgrad

        if not swizzled:
            grad_scale, rows_scale = (swizzle_column_scales(each, offsets) for each in (grad_scale, rows_scale))
        tensors = [t.contiguous() for t in (grad, grad_scale, rows, rows_scale, offsets)]
        return mx_wgrad.mx_wgrad(*tensors)
    if swizzled:
        grad_scale = unswizzle_column_scales(grad_scale, n, offsets)
        rows_scale = unswizzle_column_scales(rows_scale, k, offsets)
    wide, ends = reference.wide_dtype(grad.device), offsets.tolist()
    out = grad.new_zeros(offsets.shape[0], n, k, dtype=torch.bfloat16)
    for expert, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        if end > start:
            run, blocks = slice(start, end), slice(start // reference.MX_BLOCK, end // reference.MX_BLOCK)
            left = mx_dequantize(grad[run], grad_scale[blocks], wide, -2)
            out[expert] = left.t() @ mx_dequantize(rows[run], rows_scale[blocks], wide, -2)
    return out


@mx_grouped_mm_wgrad.register_fake
def _(
    grad: Tensor, grad_scale: Tensor, rows: Tensor, rows_scale: Tensor, offsets: Tensor, swizzled: bool = False
) -> Tensor:
    return grad.new_empty(offsets.shape[0], grad.shape[1], rows.shape[1], dtype=torch.bfloat16)
