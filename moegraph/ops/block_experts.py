"""The experts' halves of FP8 operands scaled in blocks: `fp8_block_grouped_mm`, and a pass over its result.

    fp8_block_up_swiglu               z, and the activation of it
    fp8_block_dgrad_swiglu            the gradient through the down projection, the activation and the router weight
    fp8_block_up_swiglu_quantized     the first, and fp8_quantize_blocks of the activation in the place of it
    fp8_block_dgrad_swiglu_quantized  the second, and fp8_quantize_blocks of dz beside dz

Operands and scales are those of `block_mm`, results those of `fp8_up_swiglu` and `fp8_dgrad_swiglu` (`scaled_mm`). What
those fuse into the product is here a kernel of its own, which quantises as well: a product that scales its accumulator
at every step has no registers left for an epilogue.

Legend: R routed rows, E experts, D model width, F expert width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moegraph.ops.block_mm import block_backend, fp8_block_grouped_mm
from moegraph.ops.expert_ffn import activation_slopes, gated_gradient
from moegraph.ops.mx_scales import zero_past
from moegraph.ops.quantize_blocks import BLOCK, check_rows_in_blocks, quantize_row_blocks


@torch.library.custom_op("moegraph::fp8_block_up_swiglu", mutates_args=())
def fp8_block_up_swiglu(
    rows: Tensor,
    row_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    offsets: Tensor,
    bias: Tensor | None = None,
    alpha: float = 0.0,
    limit: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """rows [R, D], weight [E, 2F, D] FP8, scales [D/128, R] and [E, ⌈2F/128⌉, D/128], bias [E, 2F] bf16 → z [R, 2F],
    a [R, F] bf16. `limit` 0 is plain SwiGLU, else the clamped one with `alpha`. Raises ValueError as
    `fp8_block_grouped_mm` does."""
    z = fp8_block_grouped_mm(rows, row_scale, weight, weight_scale, offsets, bias)
    if block_backend(weight.shape[1], weight.shape[2], rows.device)[0] != "triton":
        return z, activation_slopes(z, alpha, limit)[0].to(torch.bfloat16)
    from moegraph.kernels.activation import Activation
    from moegraph.kernels.gated_forward import gated_forward_launch

    act = z.new_empty(z.shape[0], z.shape[1] // 2)
    if act.numel():
        gated_forward_launch(z, offsets, act, activation=Activation.of(alpha, limit)).run()
    return z, act


@fp8_block_up_swiglu.register_fake
def _(
    rows: Tensor,
    row_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    offsets: Tensor,
    bias: Tensor | None = None,
    alpha: float = 0.0,
    limit: float = 0.0,
) -> tuple[Tensor, Tensor]:
    num_rows, two_f = rows.shape[0], weight.shape[1]
    z = rows.new_empty(num_rows, two_f, dtype=torch.bfloat16)
    return z, rows.new_empty(num_rows, two_f // 2, dtype=torch.bfloat16)


@torch.library.custom_op("moegraph::fp8_block_dgrad_swiglu", mutates_args=())
def fp8_block_dgrad_swiglu(
    grad: Tensor,
    grad_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    z: Tensor,
    row_weight: Tensor,
    offsets: Tensor,
    alpha: float = 0.0,
    limit: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """grad [R, D], weight [E, F, D] FP8, scales [D/128, R] and [E, ⌈F/128⌉, D/128], z [R, 2F] bf16, row_weight [R] fp32
    → dz [R, 2F] and row_weight · activation [R, F] in bf16, and the gradient of row_weight [R] fp32.

    The weight is the down projection [E, D, F] transposed and quantised. Raises ValueError as `fp8_block_grouped_mm`
    does."""
    da = fp8_block_grouped_mm(grad, grad_scale, weight, weight_scale, offsets)
    if block_backend(weight.shape[1], weight.shape[2], grad.device)[0] != "triton":
        return gated_gradient(da, z, row_weight, offsets, alpha, limit)
    return _gated_backward(da, z, row_weight, offsets, None, alpha, limit)


def _gated_backward(
    da: Tensor,
    z: Tensor,
    row_weight: Tensor,
    offsets: Tensor,
    quantized: tuple[Tensor, Tensor] | None,
    alpha: float,
    limit: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """dz, row_weight · activation and the gradient of row_weight, by the kernel; dz goes to `quantized` too."""
    from moegraph.kernels.activation import Activation
    from moegraph.kernels.gated_backward import gated_backward_launch

    dz, act, ds = z.new_empty(z.shape), torch.empty_like(da), row_weight.new_empty(row_weight.shape)
    if dz.numel():
        tensors = (da, z.contiguous(), row_weight.contiguous(), offsets, dz, act, ds, quantized)
        gated_backward_launch(*tensors, name="blocks", activation=Activation.of(alpha, limit)).run()
    return dz, act, ds


@fp8_block_dgrad_swiglu.register_fake
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
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(z), z.new_empty(z.shape[0], weight.shape[1]), row_weight.new_empty(z.shape[0])


def _empty_quantized(like: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    data = like.new_empty(rows, columns, dtype=torch.float8_e4m3fn)
    return data, like.new_empty(columns // BLOCK, rows, dtype=torch.float32)


@torch.library.custom_op("moegraph::fp8_block_up_swiglu_quantized", mutates_args=())
def fp8_block_up_swiglu_quantized(
    rows: Tensor,
    row_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    offsets: Tensor,
    bias: Tensor | None = None,
    alpha: float = 0.0,
    limit: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """The arguments of `fp8_block_up_swiglu` → z [R, 2F] bf16, and of the activation data [R, F] FP8 and scale
    [F/128, R]. Raises ValueError as that does, and for an F that is not a multiple of 128."""
    z = fp8_block_grouped_mm(rows, row_scale, weight, weight_scale, offsets, bias)
    check_rows_in_blocks(z[:, : z.shape[1] // 2])
    if block_backend(weight.shape[1], weight.shape[2], rows.device)[0] != "triton":
        act = activation_slopes(z, alpha, limit)[0].to(torch.bfloat16)
        return z, *quantize_row_blocks(zero_past(act, offsets))
    from moegraph.kernels.activation import Activation
    from moegraph.kernels.gated_forward import gated_forward

    activation = Activation.of(alpha, limit)
    _, data, scale = gated_forward(z, offsets, "blocks", kept=False, activation=activation)
    return z, data, scale


@fp8_block_up_swiglu_quantized.register_fake
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
    num_rows, two_f = rows.shape[0], weight.shape[1]
    z = rows.new_empty(num_rows, two_f, dtype=torch.bfloat16)
    return z, *_empty_quantized(rows, num_rows, two_f // 2)


@torch.library.custom_op("moegraph::fp8_block_dgrad_swiglu_quantized", mutates_args=())
def fp8_block_dgrad_swiglu_quantized(
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
    """The arguments of `fp8_block_dgrad_swiglu` → dz [R, 2F], row_weight · activation [R, F], the gradient of
    row_weight [R], and of dz data [R, 2F] FP8 and scale [2F/128, R]. Raises ValueError as that does, and for an F that
    is not a multiple of 128."""
    check_rows_in_blocks(z[:, : z.shape[1] // 2])
    da = fp8_block_grouped_mm(grad, grad_scale, weight, weight_scale, offsets)
    if block_backend(weight.shape[1], weight.shape[2], grad.device)[0] != "triton":
        dz, act, ds = gated_gradient(da, z, row_weight, offsets, alpha, limit)
        return dz, act, ds, *quantize_row_blocks(zero_past(dz, offsets))
    quantized = _empty_quantized(grad, *z.shape)
    return *_gated_backward(da, z, row_weight, offsets, quantized, alpha, limit), *quantized


@fp8_block_dgrad_swiglu_quantized.register_fake
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
    rows, two_f = z.shape
    plain = (z.new_empty(z.shape), z.new_empty(rows, weight.shape[1]), row_weight.new_empty(rows))
    return *plain, *_empty_quantized(grad, rows, two_f)
