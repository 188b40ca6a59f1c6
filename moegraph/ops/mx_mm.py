"""Grouped products of MXFP8 operands, and those of the experts with their activation, for Blackwell.

    mx_grouped_mm      out = dequantised rows · dequantised Wᵀ (+ bias) (· row_weight)     [R, N] bf16
    mx_up_swiglu       the same of the up projection, and the activation of it
    mx_dgrad_swiglu    the gradient through the down projection, the activation and the router weight

Data is float8_e4m3fn with the contraction last in both operands, a multiple of 32; each 32 elements share a scale, a
byte that is the exponent of a power of two plus 127 (OCP Microscaling Formats, version 1.0). Scales come plain or
`swizzled`, both operands' alike:

    plain      row_scale [R, K/32]                     weight_scale [E, N, K/32]
    swizzled   row_scale [128 · B, 4 · ⌈K/128⌉]        weight_scale [E, 128 · ⌈N/128⌉, 4 · ⌈K/128⌉]

In the swizzled layout, which tensor cores read, every expert's rows start a new block of 128, B = ⌈R/128⌉ + E
(`mx_scales.swizzle_row_scales`); plain scales are brought into it first where the kernels run. Offsets, rows past
the last one, input gradients and the absence of gradients are those of `scaled_mm`.

Legend: R routed rows, E experts, N output width, K contraction, D model width, F expert width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moegraph.kernels.chips import Card, card_of
from moegraph.kernels.tuning import cached_choice
from moegraph.ops import scaled_reference as reference
from moegraph.ops.expert_ffn import activation_slopes, gated_gradient
from moegraph.ops.mx_scales import num_tiles, swizzle_row_scales, swizzle_scales
from moegraph.ops.scaled_mm import check_operand, check_product


@cached_choice
def mx_backend(n: int, k: int, where: torch.device | Card) -> tuple[str, str]:
    """(backend, reason) of an MXFP8 product with n output columns (of each half for the up projection) and a
    contraction over k, on a device or a card.

    `triton`: moegraph's kernels. `emulated`: dequantised to fp32 on CPU, to bf16 elsewhere, which is exact but for
    values below 2⁻¹²⁶, then `grouped_mm`: the numbers of MXFP8 without its speed.
    """
    card = card_of(where) if isinstance(where, torch.device) else where
    if card is None:
        return "emulated", f"no CUDA device ({where})"
    if card.capability // 10 != 10:
        return "emulated", f"compute capability {card.capability // 10}.x has no MX matrix units"
    if n % 128 or k % 32:
        return "emulated", f"{n} columns and a contraction over {k} are not multiples of 128 and 32"
    return "triton", "MX matrix units; compiled for this chip, not measured on it"


def uses_mx_kernels(data: Tensor, n: int, k: int) -> bool:
    """Whether this product runs on moegraph's MX kernels."""
    return mx_backend(n, k, data.device)[0] == "triton"


def check_mx_product(
    op: str, rows: Tensor, row_scale: Tensor, weight: Tensor, weight_scale: Tensor, offsets: Tensor, swizzled: bool
) -> None:
    """Raises ValueError unless rows [R, K] and weight [E, N, K] are FP8 with scales in that layout."""
    check_product(op, rows, weight)
    (num_rows, k), (experts, n, _) = rows.shape, weight.shape
    if k % reference.MX_BLOCK:
        raise ValueError(f"{op}: a contraction over {k} is not whole blocks of {reference.MX_BLOCK}")
    of_rows, of_weight = (num_rows, k // 32), (experts, n, k // 32)
    if swizzled:
        of_rows = (128 * num_tiles(num_rows, experts), 4 * -(-k // 128))
        of_weight = (experts, 128 * -(-n // 128), 4 * -(-k // 128))
    check_operand(f"{op}: rows", rows, row_scale, of_rows, torch.uint8)
    check_operand(f"{op}: weight", weight, weight_scale, of_weight, torch.uint8)


def _swizzled(row_scale: Tensor, weight_scale: Tensor, offsets: Tensor, already: bool) -> tuple[Tensor, Tensor]:
    if already:
        return row_scale.contiguous(), weight_scale.contiguous()
    return swizzle_row_scales(row_scale, offsets), swizzle_scales(weight_scale)


@torch.library.custom_op("moegraph::mx_grouped_mm", mutates_args=())
def mx_grouped_mm(
    rows: Tensor,
    row_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    offsets: Tensor,
    bias: Tensor | None = None,
    row_weight: Tensor | None = None,
    swizzled: bool = False,
) -> Tensor:
    """rows [R, K] and weight [E, N, K] FP8 with uint8 scales, offsets [E] int32 → [R, N] bf16.

    `bias` [E, N] bf16 is added, then `row_weight` [R] fp32 scales the rows. Raises ValueError for other shapes and
    dtypes of data and scales.
    """
    check_mx_product("mx_grouped_mm", rows, row_scale, weight, weight_scale, offsets, swizzled)
    if uses_mx_kernels(rows, weight.shape[1], weight.shape[2]):
        from moegraph.kernels import mx_rows_gemm

        scales = _swizzled(row_scale, weight_scale, offsets, swizzled)
        tensors = (rows.contiguous(), scales[0], weight.contiguous(), scales[1], offsets)
        bias, row_weight = (None if t is None else t.contiguous() for t in (bias, row_weight))
        return mx_rows_gemm.mx_grouped_mm(*tensors, bias=bias, row_weight=row_weight)
    return reference.finish(
        reference.mx_product(rows, row_scale, weight, weight_scale, offsets, swizzled), bias, row_weight, offsets
    )


@mx_grouped_mm.register_fake
def _(
    rows: Tensor,
    row_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    offsets: Tensor,
    bias: Tensor | None = None,
    row_weight: Tensor | None = None,
    swizzled: bool = False,
) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[1], dtype=torch.bfloat16)


@torch.library.custom_op("moegraph::mx_up_swiglu", mutates_args=())
def mx_up_swiglu(
    rows: Tensor,
    row_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    offsets: Tensor,
    bias: Tensor | None = None,
    alpha: float = 0.0,
    limit: float = 0.0,
    swizzled: bool = False,
) -> tuple[Tensor, Tensor]:
    """rows [R, D] and weight [E, 2F, D] FP8 with uint8 scales, bias [E, 2F] bf16 → z [R, 2F], a [R, F] bf16.

    `limit` 0 is plain SwiGLU, else the clamped one with `alpha`. `a` is computed from z as stored. Raises ValueError
    as `mx_grouped_mm` does.
    """
    check_mx_product("mx_up_swiglu", rows, row_scale, weight, weight_scale, offsets, swizzled)
    if uses_mx_kernels(rows, weight.shape[1] // 2, weight.shape[2]):
        from moegraph.kernels import mx_up_swiglu as kernel
        from moegraph.kernels.activation import Activation

        scales = _swizzled(row_scale, weight_scale, offsets, swizzled)
        tensors = (rows.contiguous(), scales[0], weight.contiguous(), scales[1], offsets)
        activation = Activation.of(alpha, limit)
        return kernel.mx_up_swiglu(*tensors, bias=None if bias is None else bias.contiguous(), activation=activation)
    z = reference.finish(
        reference.mx_product(rows, row_scale, weight, weight_scale, offsets, swizzled), bias, None, offsets
    )
    return z, activation_slopes(z, alpha, limit)[0].to(torch.bfloat16)


@mx_up_swiglu.register_fake
def _(
    rows: Tensor,
    row_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    offsets: Tensor,
    bias: Tensor | None = None,
    alpha: float = 0.0,
    limit: float = 0.0,
    swizzled: bool = False,
) -> tuple[Tensor, Tensor]:
    num_rows, two_f = rows.shape[0], weight.shape[1]
    z = rows.new_empty(num_rows, two_f, dtype=torch.bfloat16)
    return z, rows.new_empty(num_rows, two_f // 2, dtype=torch.bfloat16)


@torch.library.custom_op("moegraph::mx_dgrad_swiglu", mutates_args=())
def mx_dgrad_swiglu(
    grad: Tensor,
    grad_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    z: Tensor,
    row_weight: Tensor,
    offsets: Tensor,
    alpha: float = 0.0,
    limit: float = 0.0,
    swizzled: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """grad [R, D] and weight [E, F, D] FP8 with uint8 scales, z [R, 2F] bf16, row_weight [R] fp32 → dz [R, 2F] and
    row_weight · activation [R, F] in bf16, and the gradient of row_weight [R] fp32, as `expert_ffn_dgrad` has them.

    The weight is the down projection [E, D, F] transposed and quantised along D. Raises ValueError as
    `mx_grouped_mm` does.
    """
    check_mx_product("mx_dgrad_swiglu", grad, grad_scale, weight, weight_scale, offsets, swizzled)
    if uses_mx_kernels(grad, weight.shape[1], weight.shape[2]):
        from moegraph.kernels import mx_dgrad_swiglu as kernel
        from moegraph.kernels.activation import Activation

        scales = _swizzled(grad_scale, weight_scale, offsets, swizzled)
        tensors = (grad.contiguous(), scales[0], weight.contiguous(), scales[1], z.contiguous())
        activation = Activation.of(alpha, limit)
        return kernel.mx_dgrad_swiglu(*tensors, row_weight.contiguous(), offsets, activation=activation)
    da = reference.mx_product(grad, grad_scale, weight, weight_scale, offsets, swizzled)
    return gated_gradient(da, z, row_weight, offsets, alpha, limit)


@mx_dgrad_swiglu.register_fake
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
    swizzled: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(z), z.new_empty(z.shape[0], weight.shape[1]), row_weight.new_empty(z.shape[0])
