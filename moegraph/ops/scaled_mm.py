"""Grouped products of FP8 operands with an fp32 scale per row, and those of the experts with their activation.

    fp8_grouped_mm        out = (rows · Wᵀ) · row_scale · weight_scale (+ bias) (· row_weight)      [R, N] bf16
    fp8_up_swiglu         the same of the up projection, and the activation of it
    fp8_dgrad_swiglu      the gradient through the down projection, the activation and the router weight
    fp8_grouped_mm_wgrad  dW = (Gᵀ · X) · grad_scale · rows_scale of each expert                    [E, N, K] bf16

Data is float8_e4m3fn with the contraction last in both operands, as FP8 matrix units want it; scales are fp32, one per
row of each operand: what 1 in FP8 stands for. Rows are sorted by expert and `offsets` [E] int32, on the device, are the
inclusive ends of the experts' runs. Rows past `offsets[-1]` are never read, scale included, and written as zeros. An
input gradient is the same product with a weight quantised along its other side. Nothing here has a gradient: what is
quantised, and when, is a choice of the graph.

Hopper's FP8 units keep about 14 bits of an accumulator; `exact` adds to an fp32 one every 128 products (DeepSeek-V3,
arXiv 2412.19437, section 3.3.2). Elsewhere it changes nothing.

Legend: R routed rows, E experts, N output width, K contraction, D model width, F expert width, P padded rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moegraph.kernels.chips import Card, card_of
from moegraph.kernels.tuning import cached_choice
from moegraph.ops import scaled_reference as reference
from moegraph.ops.expert_ffn import activation_slopes, gated_gradient

FP8 = torch.float8_e4m3fn
WGRAD_ALIGN = 128  # where the experts' runs of a weight gradient start and end, in rows


@cached_choice
def fp8_backend(n: int, k: int, where: torch.device | Card) -> tuple[str, str]:
    """(backend, reason) of an FP8 product with n output columns and a contraction over k, on a device or a card.

    `triton`: moegraph's kernels. `emulated`: the operands in fp32 on CPU, in bf16 elsewhere, through `grouped_mm`.
    """
    card = card_of(where) if isinstance(where, torch.device) else where
    if card is None:
        return "emulated", f"no CUDA device ({where})"
    if card.capability // 10 not in (9, 10):
        return "emulated", f"no FP8 kernels are written for compute capability {card.capability // 10}.x"
    if no_fp8_kernel(n, k):
        return "emulated", no_fp8_kernel(n, k)
    if card.capability // 10 == 10:
        return "triton", "compiled for this chip, not measured on it"
    return "triton", "FP8 matrix units"


def no_fp8_kernel(n: int, k: int) -> str:
    """Why no FP8 kernel takes products of widths n and k; empty where one does."""
    return f"rows of {n} and {k} elements are not multiples of 16 bytes" if n % 16 or k % 16 else ""


def uses_fp8_kernels(data: Tensor, n: int, k: int) -> bool:
    """Whether this product runs on moegraph's FP8 kernels."""
    return fp8_backend(n, k, data.device)[0] == "triton"


def check_operand(name: str, data: Tensor, scale: Tensor, shape: tuple[int, ...], scale_dtype: torch.dtype) -> None:
    """Raises ValueError unless data is FP8 and `scale` has that shape and dtype."""
    if data.dtype != FP8:
        raise ValueError(f"{name} must be {FP8}, got {data.dtype}")
    if scale.dtype != scale_dtype or tuple(scale.shape) != shape:
        wanted = f"{list(shape)} of {scale_dtype}"
        raise ValueError(f"the scale of {name} must be {wanted}, got {list(scale.shape)} of {scale.dtype}")


def check_product(op: str, rows: Tensor, weight: Tensor) -> None:
    """Raises ValueError unless rows [R, K] and weight [E, N, K] share their contraction."""
    if rows.dim() != 2 or weight.dim() != 3 or rows.shape[1] != weight.shape[2]:
        raise ValueError(f"{op}: {list(rows.shape)} and {list(weight.shape)} are not [R, K] and [E, N, K]")


def _check(op: str, rows: Tensor, row_scale: Tensor, weight: Tensor, weight_scale: Tensor) -> None:
    check_product(op, rows, weight)
    check_operand(f"{op}: rows", rows, row_scale, (rows.shape[0],), torch.float32)
    check_operand(f"{op}: weight", weight, weight_scale, tuple(weight.shape[:2]), torch.float32)


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


@torch.library.custom_op("moegraph::fp8_grouped_mm", mutates_args=())
def fp8_grouped_mm(
    rows: Tensor,
    row_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    offsets: Tensor,
    bias: Tensor | None = None,
    row_weight: Tensor | None = None,
    exact: bool = False,
) -> Tensor:
    """rows [R, K] and weight [E, N, K] FP8, row_scale [R] and weight_scale [E, N] fp32, offsets [E] → [R, N] bf16.

    `bias` [E, N] bf16 is added, then `row_weight` [R] fp32 scales the rows. Raises ValueError for other shapes and
    dtypes of data and scales.
    """
    _check("fp8_grouped_mm", rows, row_scale, weight, weight_scale)
    if uses_fp8_kernels(rows, weight.shape[1], weight.shape[2]):
        from moegraph.kernels import fp8_rows_gemm

        tensors = [t.contiguous() for t in (rows, row_scale, weight, weight_scale, offsets)]
        bias, row_weight = _contiguous(bias), _contiguous(row_weight)
        return fp8_rows_gemm.fp8_grouped_mm(*tensors, bias=bias, row_weight=row_weight, exact=exact)
    out = reference.fp8_product(rows, row_scale, weight, weight_scale, offsets)
    return reference.finish(out, bias, row_weight, offsets)


@fp8_grouped_mm.register_fake
def _(
    rows: Tensor,
    row_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    offsets: Tensor,
    bias: Tensor | None = None,
    row_weight: Tensor | None = None,
    exact: bool = False,
) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[1], dtype=torch.bfloat16)


@torch.library.custom_op("moegraph::fp8_up_swiglu", mutates_args=())
def fp8_up_swiglu(
    rows: Tensor,
    row_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    offsets: Tensor,
    bias: Tensor | None = None,
    alpha: float = 0.0,
    limit: float = 0.0,
    exact: bool = False,
) -> tuple[Tensor, Tensor]:
    """rows [R, D] and weight [E, 2F, D] FP8, scales [R] and [E, 2F], bias [E, 2F] bf16 → z [R, 2F], a [R, F] bf16.

    `limit` 0 is plain SwiGLU, else the clamped one with `alpha`. `a` is computed from z as stored. Raises ValueError
    as `fp8_grouped_mm` does.
    """
    _check("fp8_up_swiglu", rows, row_scale, weight, weight_scale)
    if uses_fp8_kernels(rows, weight.shape[1] // 2, weight.shape[2]):
        from moegraph.kernels import fp8_up_swiglu as kernel
        from moegraph.kernels.activation import Activation

        tensors = [t.contiguous() for t in (rows, row_scale, weight, weight_scale, offsets)]
        activation = Activation.of(alpha, limit)
        return kernel.fp8_up_swiglu(*tensors, bias=_contiguous(bias), activation=activation, exact=exact)
    z = reference.finish(reference.fp8_product(rows, row_scale, weight, weight_scale, offsets), bias, None, offsets)
    return z, activation_slopes(z, alpha, limit)[0].to(torch.bfloat16)


@fp8_up_swiglu.register_fake
def _(
    rows: Tensor,
    row_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    offsets: Tensor,
    bias: Tensor | None = None,
    alpha: float = 0.0,
    limit: float = 0.0,
    exact: bool = False,
) -> tuple[Tensor, Tensor]:
    num_rows, two_f = rows.shape[0], weight.shape[1]
    z = rows.new_empty(num_rows, two_f, dtype=torch.bfloat16)
    return z, rows.new_empty(num_rows, two_f // 2, dtype=torch.bfloat16)


@torch.library.custom_op("moegraph::fp8_dgrad_swiglu", mutates_args=())
def fp8_dgrad_swiglu(
    grad: Tensor,
    grad_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    z: Tensor,
    row_weight: Tensor,
    offsets: Tensor,
    alpha: float = 0.0,
    limit: float = 0.0,
    exact: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """grad [R, D] and weight [E, F, D] FP8, scales [R] and [E, F], z [R, 2F] bf16, row_weight [R] fp32 → dz [R, 2F]
    and row_weight · activation [R, F] in bf16, and the gradient of row_weight [R] fp32, as `expert_ffn_dgrad` has them.

    The weight is the down projection [E, D, F] transposed and quantised along D. Raises ValueError as
    `fp8_grouped_mm` does.
    """
    _check("fp8_dgrad_swiglu", grad, grad_scale, weight, weight_scale)
    if uses_fp8_kernels(grad, weight.shape[1], weight.shape[2]):
        from moegraph.kernels import fp8_dgrad_swiglu as kernel
        from moegraph.kernels.activation import Activation

        tensors = [t.contiguous() for t in (grad, grad_scale, weight, weight_scale, z, row_weight, offsets)]
        return kernel.fp8_dgrad_swiglu(*tensors, activation=Activation.of(alpha, limit), exact=exact)
    da = reference.fp8_product(grad, grad_scale, weight, weight_scale, offsets)
    return gated_gradient(da, z, row_weight, offsets, alpha, limit)


@fp8_dgrad_swiglu.register_fake
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
    exact: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(z), z.new_empty(z.shape[0], weight.shape[1]), row_weight.new_empty(z.shape[0])


@torch.library.custom_op("moegraph::fp8_grouped_mm_wgrad", mutates_args=())
def fp8_grouped_mm_wgrad(
    grad_t: Tensor, grad_scale: Tensor, rows_t: Tensor, rows_scale: Tensor, offsets: Tensor, exact: bool = False
) -> Tensor:
    """grad_t [N, P] and rows_t [K, P] FP8, scales [E, N] and [E, K] fp32 per expert and column → dW [E, N, K] bf16.

    `offsets` [E] are the ends of the experts' runs in P, each a multiple of `WGRAD_ALIGN`; what pads a run is zero in
    one operand and finite in the other. Past the last offset nothing is read; an empty run gives zeros. P is a multiple
    of 16. Raises ValueError for other shapes and dtypes; that the offsets are aligned is not checked.
    """
    experts = offsets.shape[0]
    if grad_t.dim() != 2 or rows_t.dim() != 2 or grad_t.shape[1] != rows_t.shape[1] or grad_t.shape[1] % 16:
        raise ValueError(
            f"fp8_grouped_mm_wgrad: {list(grad_t.shape)} and {list(rows_t.shape)} are not [N, P] and [K, P], P % 16 = 0"
        )
    check_operand("fp8_grouped_mm_wgrad: grad_t", grad_t, grad_scale, (experts, grad_t.shape[0]), torch.float32)
    check_operand("fp8_grouped_mm_wgrad: rows_t", rows_t, rows_scale, (experts, rows_t.shape[0]), torch.float32)
    if uses_fp8_kernels(grad_t, grad_t.shape[0], rows_t.shape[0]):
        from moegraph.kernels import fp8_wgrad

        tensors = [t.contiguous() for t in (grad_t, grad_scale, rows_t, rows_scale, offsets)]
        return fp8_wgrad.fp8_wgrad(*tensors, exact=exact)
    return reference.fp8_wgrad(grad_t, grad_scale, rows_t, rows_scale, offsets)


@fp8_grouped_mm_wgrad.register_fake
def _(
    grad_t: Tensor, grad_scale: Tensor, rows_t: Tensor, rows_scale: Tensor, offsets: Tensor, exact: bool = False
) -> Tensor:
    return grad_t.new_empty(offsets.shape[0], grad_t.shape[0], rows_t.shape[0], dtype=torch.bfloat16)
