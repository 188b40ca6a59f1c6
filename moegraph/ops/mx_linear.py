"""The product of a linear layer with MXFP8 operands: one matrix where `mx_mm` has one for each expert.

    out = dequantised x · dequantised Wᵀ (+ bias)     [T, N] bf16

Data, scales and swizzled scales are those of `mx_mm`, of plain matrices:

    plain      x_scale [T, K/32]                          weight_scale [N, K/32]
    swizzled   x_scale [128 · ⌈T/128⌉, 4 · ⌈K/128⌉]       weight_scale [128 · ⌈N/128⌉, 4 · ⌈K/128⌉]

On Blackwell it runs on the kernel of `mx_grouped_mm`, all rows being one expert's; elsewhere it is emulated, as
`mx_backend` says. An input gradient is the same product with the weight transposed and quantised along its other side.
Nothing here has a gradient.

Legend: T tokens, N output width, K contraction.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moegraph.ops import scaled_reference as reference
from moegraph.ops.mx_mm import uses_mx_kernels
from moegraph.ops.mx_scales import swizzle_scales, unswizzle_scales
from moegraph.ops.scaled_mm import check_operand


def _check(x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, swizzled: bool) -> None:
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"mx_linear: {list(x.shape)} and {list(weight.shape)} are not [T, K] and [N, K]")
    k = x.shape[1]
    if k % reference.MX_BLOCK:
        raise ValueError(f"mx_linear: a contraction over {k} is not whole blocks of {reference.MX_BLOCK}")
    for name, data, scale in (("x", x, x_scale), ("weight", weight, weight_scale)):
        rows = data.shape[0]
        shape = (128 * -(-rows // 128), 4 * -(-k // 128)) if swizzled else (rows, k // 32)
        check_operand(f"mx_linear: {name}", data, scale, shape, torch.uint8)


def _dequantised(data: Tensor, scale: Tensor, swizzled: bool) -> Tensor:
    if swizzled:
        scale = unswizzle_scales(scale, data.shape[0], data.shape[1] // reference.MX_BLOCK)
    return reference.mx_dequantise(data, scale, reference.wide_dtype(data.device))


@torch.library.custom_op("moegraph::mx_linear", mutates_args=())
def mx_linear(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    swizzled: bool = False,
) -> Tensor:
    """x [T, K] and weight [N, K] FP8 with uint8 scales, bias [N] bf16 → [T, N] bf16.

    Raises ValueError for other shapes and dtypes of data and scales.
    """
    _check(x, x_scale, weight, weight_scale, swizzled)
    if uses_mx_kernels(x, *weight.shape):
        from moegraph.kernels import mx_rows_gemm

        if not swizzled:
            x_scale, weight_scale = swizzle_scales(x_scale), swizzle_scales(weight_scale)
        offsets = torch.full((1,), x.shape[0], dtype=torch.int32, device=x.device)
        tensors = (x.contiguous(), x_scale.contiguous(), weight.contiguous()[None], weight_scale.contiguous()[None])
        return mx_rows_gemm.mx_grouped_mm(*tensors, offsets, bias=None if bias is None else bias.contiguous()[None])
    out = (_dequantised(x, x_scale, swizzled) @ _dequantised(weight, weight_scale, swizzled).t()).float()
    return (out if bias is None else out + bias.float()).to(torch.bfloat16)


@mx_linear.register_fake
def _(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None = None,
    swizzled: bool = False,
) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0], dtype=torch.bfloat16)
