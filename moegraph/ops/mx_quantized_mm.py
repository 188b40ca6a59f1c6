"""The experts' halves in MXFP8 whose results are in MXFP8 as well, as the next product reads them.

    mx_up_swiglu_quantized      mx_up_swiglu, and mx_quantize_rows of the activation in the place of the activation
    mx_dgrad_swiglu_quantized   mx_dgrad_swiglu, and mx_quantize_rows of dz beside dz
    mx_up_swiglu_saved          the first, and mx_quantize_rows of z, with plain scales, in the place of z
    mx_dgrad_swiglu_saved       the second, of such a z, as mx_dequantize_rows restores it

They give those bits: results are rounded to bf16 first. All other scales, of operands and of results, are swizzled;
the rest of the contracts is that of `mx_mm` and `quantize`. On Blackwell the epilogues of the products do it, and add
up the gradient of row_weight in another order; the clamped activation's gradient is a kernel of its own behind one.

Legend: R routed rows, E experts, D model width, F expert width, R' padded rows = (ceil(R / 128) + E) · 128; ⌈n⌉ is n
rounded up to a multiple of 128.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moegraph.ops import scaled_reference as reference
from moegraph.ops.expert_ffn import activation_slopes, gated_gradient
from moegraph.ops.mx_format import BLOCK, check_mx_scales, mx_dequantize, mx_quantize
from moegraph.ops.mx_mm import check_mx_product, uses_mx_kernels
from moegraph.ops.mx_scales import TILE, num_tiles, swizzle_row_scales, zero_past

_E4M3 = torch.float8_e4m3fn


def _quantized(x: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """(data, swizzled scales) of ragged rows x [R, K]."""
    data, scale = mx_quantize(zero_past(x, offsets), -1)
    return data, swizzle_row_scales(scale, offsets)


def _empty_quantized(like: Tensor, rows: int, columns: int, experts: int) -> tuple[Tensor, Tensor]:
    high = num_tiles(rows, experts) * TILE
    scale = like.new_empty(high, -(-columns // TILE) * TILE // BLOCK, dtype=torch.uint8)
    return like.new_empty(rows, columns, dtype=_E4M3), scale


@torch.library.custom_op("moegraph::mx_up_swiglu_quantized", mutates_args=())
def mx_up_swiglu_quantized(
    rows: Tensor,
    row_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    offsets: Tensor,
    bias: Tensor | None = None,
    alpha: float = 0.0,
    limit: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """rows [R, D] and weight [E, 2F, D] FP8 with swizzled scales, bias [E, 2F] bf16 → z [R, 2F] bf16, and of the
    activation data [R, F] FP8 and scale [R', ⌈F⌉/32]. Raises ValueError as `mx_grouped_mm`, and for an F that is not a
    multiple of 32."""
    check_mx_product("mx_up_swiglu_quantized", rows, row_scale, weight, weight_scale, offsets, True)
    f = weight.shape[1] // 2
    if f % BLOCK:
        raise ValueError(f"mx_up_swiglu_quantized: {f} columns of the activation are not whole blocks of {BLOCK}")
    if uses_mx_kernels(rows, f, weight.shape[2]):
        from moegraph.kernels import mx_up_swiglu as kernel
        from moegraph.kernels.activation import Activation

        tensors = [t.contiguous() for t in (rows, row_scale, weight, weight_scale, offsets)]
        activation = Activation.of(alpha, limit)
        bias = None if bias is None else bias.contiguous()
        return kernel.mx_up_swiglu_quantized(*tensors, bias=bias, activation=activation)
    product = reference.mx_product(rows, row_scale, weight, weight_scale, offsets, True)
    z = reference.finish(product, bias, None, offsets)
    return z, *_quantized(activation_slopes(z, alpha, limit)[0].to(torch.bfloat16), offsets)


@mx_up_swiglu_quantized.register_fake
def _(
    rows: Tensor,
    row_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    offsets: Tensor,
    bias: Tensor | None = None,
    alpha: float = 0.0,
    limit: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    num_rows, (experts, two_f, _) = rows.shape[0], weight.shape
    z = rows.new_empty(num_rows, two_f, dtype=torch.bfloat16)
    return z, *_empty_quantized(rows, num_rows, two_f // 2, experts)


@torch.library.custom_op("moegraph::mx_up_swiglu_saved", mutates_args=())
def mx_up_swiglu_saved(
    rows: Tensor,
    row_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    offsets: Tensor,
    bias: Tensor | None = None,
    alpha: float = 0.0,
    limit: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `mx_up_swiglu_quantized`, with z as data [R, 2F] FP8 and plain scale [R, 2F/32]."""
    if uses_mx_kernels(rows, weight.shape[1] // 2, weight.shape[2]):
        from moegraph.kernels import mx_up_swiglu as kernel
        from moegraph.kernels.activation import Activation

        check_mx_product("mx_up_swiglu_saved", rows, row_scale, weight, weight_scale, offsets, True)
        tensors = [t.contiguous() for t in (rows, row_scale, weight, weight_scale, offsets)]
        activation = Activation.of(alpha, limit)
        bias = None if bias is None else bias.contiguous()
        return kernel.mx_up_swiglu_saved(*tensors, bias=bias, activation=activation)
    arguments = (rows, row_scale, weight, weight_scale, offsets, bias, alpha, limit)
    z, data, scale = mx_up_swiglu_quantized(*arguments)
    return *mx_quantize(zero_past(z, offsets), -1), data, scale


@mx_up_swiglu_saved.register_fake
def _(
    rows: Tensor,
    row_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    offsets: Tensor,
    bias: Tensor | None = None,
    alpha: float = 0.0,
    limit: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_rows, (experts, two_f, _) = rows.shape[0], weight.shape
    z = rows.new_empty(num_rows, two_f, dtype=_E4M3)
    z_scale = rows.new_empty(num_rows, two_f // BLOCK, dtype=torch.uint8)
    return z, z_scale, *_empty_quantized(rows, num_rows, two_f // 2, experts)


@torch.library.custom_op("moegraph::mx_dgrad_swiglu_quantized", mutates_args=())
def mx_dgrad_swiglu_quantized(
    grad: Tensor,
    grad_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    z: Tensor,
    row_weight: Tensor,
    offsets: Tensor,
    alpha: float = 0.0,
    limit: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The arguments of `mx_dgrad_swiglu` with swizzled scales → dz [R, 2F], row_weight · activation [R, F], the
    gradient of row_weight [R], and of dz data [R, 2F] FP8 and scale [R', ⌈2F⌉/32]. Raises ValueError as
    `mx_grouped_mm`, and for an F that is not a multiple of 16."""
    check_mx_product("mx_dgrad_swiglu_quantized", grad, grad_scale, weight, weight_scale, offsets, True)
    if z.shape[1] % BLOCK:
        raise ValueError(f"mx_dgrad_swiglu_quantized: {z.shape[1]} columns of dz are not whole blocks of {BLOCK}")
    if uses_mx_kernels(grad, weight.shape[1], weight.shape[2]):
        from moegraph.kernels import mx_dgrad_swiglu as kernel
        from moegraph.kernels.activation import Activation

        tensors = [t.contiguous() for t in (grad, grad_scale, weight, weight_scale, z, row_weight, offsets)]
        return kernel.mx_dgrad_swiglu_quantized(*tensors, activation=Activation.of(alpha, limit))
    da = reference.mx_product(grad, grad_scale, weight, weight_scale, offsets, True)
    dz, act, d_weight = gated_gradient(da, z, row_weight, offsets, alpha, limit)
    return dz, act, d_weight, *_quantized(dz, offsets)


@mx_dgrad_swiglu_quantized.register_fake
def _(
    grad: Tensor,
    grad_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    z: Tensor,
    row_weight: Tensor,
    offsets: Tensor,
    alpha: float = 0.0,
    limit: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows, (experts, f, _) = z.shape[0], weight.shape
    plain = (torch.empty_like(z), z.new_empty(rows, f), row_weight.new_empty(rows))
    return *plain, *_empty_quantized(grad, rows, z.shape[1], experts)


@torch.library.custom_op("moegraph::mx_dgrad_swiglu_saved", mutates_args=())
def mx_dgrad_swiglu_saved(
    grad: Tensor,
    grad_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    z: Tensor,
    z_scale: Tensor,
    row_weight: Tensor,
    offsets: Tensor,
    alpha: float = 0.0,
    limit: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As `mx_dgrad_swiglu_quantized`, with z as data [R, 2F] FP8 and plain scale [R, 2F/32]. Raises ValueError for
    another shape of that, too."""
    check_mx_scales(z, z_scale)
    if uses_mx_kernels(grad, weight.shape[1], weight.shape[2]):
        from moegraph.kernels import mx_dgrad_swiglu as kernel
        from moegraph.kernels.activation import Activation

        check_mx_product("mx_dgrad_swiglu_saved", grad, grad_scale, weight, weight_scale, offsets, True)
        tensors = (grad, grad_scale, weight, weight_scale, z, z_scale, row_weight, offsets)
        activation = Activation.of(alpha, limit)
        return kernel.mx_dgrad_swiglu_saved(*[t.contiguous() for t in tensors], activation=activation)
    restored = mx_dequantize(z, z_scale)
    result: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] = mx_dgrad_swiglu_quantized(
        grad, grad_scale, weight, weight_scale, restored, row_weight, offsets, alpha, limit
    )
    return result


@mx_dgrad_swiglu_saved.register_fake
def _(
    grad: Tensor,
    grad_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    z: Tensor,
    z_scale: Tensor,
    row_weight: Tensor,
    offsets: Tensor,
    alpha: float = 0.0,
    limit: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    check_mx_scales(z, z_scale)
    rows, (experts, f, _) = z.shape[0], weight.shape
    dz, act = (z.new_empty(rows, width, dtype=torch.bfloat16) for width in (2 * f, f))
    return dz, act, row_weight.new_empty(rows), *_empty_quantized(grad, rows, 2 * f, experts)
