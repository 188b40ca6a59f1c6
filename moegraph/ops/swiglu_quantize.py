"""The experts' activation and its gradient with their 8-bit form, as one operator: where no product's epilogue does it.

    swiglu_quantized            quantise(a),      a = swiglu(z), or the clamped one
    swiglu_kept_quantized       a, quantise(a)
    swiglu_backward_quantized   dz, quantise(dz)  dz the gradient of z

They give the bits of `pointwise` and then of a quantiser on what that would have stored, and save a read of it:

    scales    quantiser             data and scale of x [R, K]
    mx        mx_quantize_rows      data [R, K], swizzled scale [R', ⌈K⌉/32] uint8
    fp8       fp8_quantize_rows     data [R, K], scale [R] fp32
    blocks    fp8_quantize_blocks   data [R, K], scale [K/128, R] fp32

Rows past the last offset are zeros, in 16 bits too, and not read; without offsets all rows exist. On CUDA, from compute
capability 8.9 on, one Triton kernel each, whose exponential is Triton's: a result may be the next number in bf16.
Nothing here has a gradient.

Legend: R rows, F expert width, E experts, R' padded rows = (ceil(R / 128) + E) · 128; ⌈n⌉ is n rounded up to a
multiple of 128.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moegraph.ops import fp8_format, pointwise, quantize_blocks
from moegraph.ops.mx_format import BLOCK, check_mx_input, mx_quantize
from moegraph.ops.mx_scales import TILE, num_tiles, swizzle_row_scales, swizzle_scales, zero_past
from moegraph.ops.quantize import uses_kernels

SHARING = {"mx": BLOCK, "fp8": 1, "blocks": quantize_blocks.BLOCK}  # columns that share a scale have to be whole blocks


def _check(op: str, z: Tensor, scales: str) -> None:
    if scales not in SHARING:
        raise ValueError(f"{op}: scales {scales!r} are not one of {', '.join(SHARING)}")
    if z.dim() != 2 or z.shape[1] % (2 * SHARING[scales]):
        raise ValueError(f"{op}: {list(z.shape)} is not [R, 2F] with F of whole blocks of {SHARING[scales]}")
    if scales == "mx":
        check_mx_input(z, -1)
    fp8_format.check_fp8_input(z)


def _quantized(x: Tensor, offsets: Tensor | None, scales: str) -> tuple[Tensor, Tensor]:
    if scales == "fp8":
        return fp8_format.quantize_rows(x, offsets)
    x = x if offsets is None else zero_past(x, offsets)
    if scales == "blocks":
        return quantize_blocks.quantize_row_blocks(x)
    data, scale = mx_quantize(x, -1)
    return data, swizzle_scales(scale) if offsets is None else swizzle_row_scales(scale, offsets)


def _fake(like: Tensor, columns: int, offsets: Tensor | None, scales: str) -> tuple[Tensor, Tensor]:
    rows = like.shape[0]
    data = like.new_empty(rows, columns, dtype=torch.float8_e4m3fn)
    if scales == "mx":
        high = num_tiles(rows, 0 if offsets is None else offsets.shape[0]) * TILE
        return data, like.new_empty(high, -(-columns // TILE) * TILE // BLOCK, dtype=torch.uint8)
    shape = (rows,) if scales == "fp8" else (columns // quantize_blocks.BLOCK, rows)
    return data, like.new_empty(shape, dtype=torch.float32)


def _activation(z: Tensor, offsets: Tensor | None, alpha: float, limit: float) -> Tensor:
    z = z if offsets is None else zero_past(z, offsets)
    return pointwise.swiglu_clamped(z, alpha=alpha, limit=limit) if limit else pointwise.swiglu(z)


@torch.library.custom_op("moegraph::swiglu_quantized", mutates_args=())
def swiglu_quantized(
    z: Tensor, offsets: Tensor | None, alpha: float, limit: float, scales: str
) -> tuple[Tensor, Tensor]:
    """z [R, 2F] bf16, fp16 or fp32, offsets [E] → of the activation data [R, F] FP8 and scale. `limit` 0 is plain
    SwiGLU, else the clamped one with `alpha`. Raises ValueError for an F that is not whole blocks of what shares a
    scale, and for another dtype."""
    _check("swiglu_quantized", z, scales)
    if uses_kernels(z):
        from moegraph.kernels.activation import Activation
        from moegraph.kernels.gated_forward import gated_forward

        activation = Activation.of(alpha, limit)
        return gated_forward(z.contiguous(), offsets, scales, kept=False, activation=activation)[1:]
    return _quantized(_activation(z, offsets, alpha, limit), offsets, scales)


@swiglu_quantized.register_fake
def _(z: Tensor, offsets: Tensor | None, alpha: float, limit: float, scales: str) -> tuple[Tensor, Tensor]:
    _check("swiglu_quantized", z, scales)
    return _fake(z, z.shape[1] // 2, offsets, scales)


@torch.library.custom_op("moegraph::swiglu_kept_quantized", mutates_args=())
def swiglu_kept_quantized(
    z: Tensor, offsets: Tensor | None, alpha: float, limit: float, scales: str
) -> tuple[Tensor, Tensor, Tensor]:
    """As `swiglu_quantized`, with the activation [R, F] in the dtype of z before data and scale."""
    _check("swiglu_kept_quantized", z, scales)
    if uses_kernels(z):
        from moegraph.kernels.activation import Activation
        from moegraph.kernels.gated_forward import gated_forward

        activation = Activation.of(alpha, limit)
        act, data, scale = gated_forward(z.contiguous(), offsets, scales, kept=True, activation=activation)
        assert act is not None
        return act, data, scale
    act = _activation(z, offsets, alpha, limit)
    return act, *_quantized(act, offsets, scales)


@swiglu_kept_quantized.register_fake
def _(z: Tensor, offsets: Tensor | None, alpha: float, limit: float, scales: str) -> tuple[Tensor, Tensor, Tensor]:
    _check("swiglu_kept_quantized", z, scales)
    return z.new_empty(z.shape[0], z.shape[1] // 2), *_fake(z, z.shape[1] // 2, offsets, scales)


@torch.library.custom_op("moegraph::swiglu_backward_quantized", mutates_args=())
def swiglu_backward_quantized(
    grad: Tensor, z: Tensor, offsets: Tensor | None, alpha: float, limit: float, scales: str
) -> tuple[Tensor, Tensor, Tensor]:
    """grad [R, F] of the activation, z [R, 2F], offsets [E] → dz [R, 2F], and of it data [R, 2F] FP8 and scale. Raises
    ValueError as `swiglu_quantized`, and for gradients of another shape."""
    _check("swiglu_backward_quantized", z, scales)
    if 2 * grad.shape[-1] != z.shape[1] or grad.shape[0] != z.shape[0]:
        raise ValueError(f"swiglu_backward_quantized: {list(grad.shape)} are not gradients of {list(z.shape)}")
    if uses_kernels(z):
        from moegraph.kernels.activation import Activation
        from moegraph.kernels.gated_gradient import gated_gradient

        activation = Activation.of(alpha, limit)
        return gated_gradient(grad.contiguous(), z.contiguous(), offsets, scales, activation=activation)
    if offsets is not None:
        grad, z = zero_past(grad, offsets), zero_past(z, offsets)
    if limit:
        dz = pointwise.swiglu_clamped_backward(grad, z, alpha, limit)
    else:
        dz = pointwise.swiglu_backward(grad, z)
    return dz, *_quantized(dz, offsets, scales)


@swiglu_backward_quantized.register_fake
def _(
    grad: Tensor, z: Tensor, offsets: Tensor | None, alpha: float, limit: float, scales: str
) -> tuple[Tensor, Tensor, Tensor]:
    _check("swiglu_backward_quantized", z, scales)
    return z.new_empty(z.shape), *_fake(z, z.shape[1], offsets, scales)
