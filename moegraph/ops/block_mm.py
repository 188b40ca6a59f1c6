"""FP8 grouped products with scales in blocks of 128, for Hopper: a kernel can quantise what it makes.

    fp8_up_swiglu_blocks  z, and the activation in FP8 with a scale per row and 128 columns
    fp8_block_grouped_mm  out = Σ_c (rows[:, c] · W[:, c]ᵀ) · row_scale[c] · weight_scale[:, c] (+ bias) (· row_weight)

c are blocks of 128 of the contraction (DeepSeek-V3, arXiv 2412.19437, section 3.3.1). Data is float8_e4m3fn with the
contraction last; scales are fp32, row_scale [K/128, R] and weight_scale [E, ⌈N/128⌉, K/128]: one per 128 × 128.
Offsets, rows past the last one and the absence of gradients are those of `scaled_mm`.

Legend: R routed rows, E experts, N output width, K contraction, D model width, F expert width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moegraph.kernels.chips import Card, card_of
from moegraph.kernels.tuning import cached_choice
from moegraph.ops import scaled_reference as reference
from moegraph.ops.expert_ffn import activation_slopes
from moegraph.ops.grouped_mm import product
from moegraph.ops.scaled_mm import FP8, check_operand, check_product, no_fp8_kernel

BLOCK = 128  # of the contraction, and of a weight's rows: what shares a scale
_LARGEST = 448.0


@cached_choice
def block_backend(n: int, k: int, where: torch.device | Card) -> tuple[str, str]:
    """(backend, reason) of a product with scales in blocks, on a device or a card.

    `triton`: moegraph's kernels. `emulated`: dequantised to fp32 on CPU, to bf16 elsewhere, then `grouped_mm`.
    """
    card = card_of(where) if isinstance(where, torch.device) else where
    if card is None:
        return "emulated", f"no CUDA device ({where})"
    if card.capability // 10 != 9:
        return "emulated", f"written for Hopper, not for compute capability {card.capability // 10}.x"
    if no_fp8_kernel(n, k):
        return "emulated", no_fp8_kernel(n, k)
    return "triton", "FP8 matrix units"


def _spread(scale: Tensor, size: int, dim: int) -> Tensor:
    return scale.repeat_interleave(BLOCK, dim).narrow(dim, 0, size)


def _quantised(act: Tensor) -> tuple[Tensor, Tensor]:
    """act [R, F] → FP8 data, and scales [F/128, R]."""
    blocks = act.view(act.shape[0], -1, BLOCK)
    largest = blocks.abs().amax(-1, keepdim=True)
    inverse = (_LARGEST / largest).clamp_max(torch.finfo(torch.float32).max)
    data = (blocks * inverse).clamp(-_LARGEST, _LARGEST).to(FP8)
    scale = torch.where(largest == 0, 1.0, largest / _LARGEST)
    return data.flatten(1), scale[..., 0].t().contiguous()


@torch.library.custom_op("moegraph::fp8_block_grouped_mm", mutates_args=())
def fp8_block_grouped_mm(
    rows: Tensor,
    row_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    offsets: Tensor,
    bias: Tensor | None = None,
    row_weight: Tensor | None = None,
) -> Tensor:
    """rows [R, K], weight [E, N, K] FP8, row_scale [K/128, R], weight_scale [E, ⌈N/128⌉, K/128] → [R, N] bf16.

    `bias` [E, N] bf16 is added, then `row_weight` [R] fp32 scales the rows. Raises ValueError for other shapes and
    dtypes, and for K % 128 ≠ 0.
    """
    check_product("fp8_block_grouped_mm", rows, weight)
    (num_rows, k), (experts, n, _) = rows.shape, weight.shape
    if k % BLOCK:
        raise ValueError(f"fp8_block_grouped_mm: a contraction over {k} is not whole blocks of {BLOCK}")
    check_operand("fp8_block_grouped_mm: rows", rows, row_scale, (k // BLOCK, num_rows), torch.float32)
    shape = (experts, -(-n // BLOCK), k // BLOCK)
    check_operand("fp8_block_grouped_mm: weight", weight, weight_scale, shape, torch.float32)
    if block_backend(n, k, rows.device)[0] == "triton":
        from moegraph.kernels import fp8_block_gemm

        tensors = [t.contiguous() for t in (rows, row_scale, weight, weight_scale, offsets)]
        bias, row_weight = (None if t is None else t.contiguous() for t in (bias, row_weight))
        return fp8_block_gemm.fp8_block_grouped_mm(*tensors, bias=bias, row_weight=row_weight)
    wide = reference.wide_dtype(rows.device)
    left = (rows.float() * _spread(row_scale.t(), k, 1)).to(wide)
    right = (weight.float() * _spread(_spread(weight_scale, n, 1), k, 2)).to(wide)
    return reference.finish(product(left, right, offsets).float(), bias, row_weight, offsets)


@fp8_block_grouped_mm.register_fake
def _(
    rows: Tensor,
    row_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    offsets: Tensor,
    bias: Tensor | None = None,
    row_weight: Tensor | None = None,
) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[1], dtype=torch.bfloat16)


@torch.library.custom_op("moegraph::fp8_up_swiglu_blocks", mutates_args=())
def fp8_up_swiglu_blocks(
    rows: Tensor,
    row_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    offsets: Tensor,
    bias: Tensor | None = None,
    alpha: float = 0.0,
    limit: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `fp8_up_swiglu`, scales of the operands included → z [R, 2F] bf16, a [R, F] FP8, its scales [F/128, R] fp32.

    `a` is quantised from fp32, computed from z as stored; a block of zeros has scale 1. Raises ValueError as
    `fp8_up_swiglu` does, and for F % 128 ≠ 0.
    """
    check_product("fp8_up_swiglu_blocks", rows, weight)
    if weight.shape[1] % (2 * BLOCK):
        raise ValueError(f"fp8_up_swiglu_blocks: {weight.shape[1] // 2} columns are not whole blocks of {BLOCK}")
    check_operand("fp8_up_swiglu_blocks: rows", rows, row_scale, (rows.shape[0],), torch.float32)
    check_operand("fp8_up_swiglu_blocks: weight", weight, weight_scale, tuple(weight.shape[:2]), torch.float32)
    if block_backend(weight.shape[1] // 2, weight.shape[2], rows.device)[0] == "triton":
        from moegraph.kernels import fp8_up_swiglu as kernel
        from moegraph.kernels.activation import Activation

        tensors = [t.contiguous() for t in (rows, row_scale, weight, weight_scale, offsets)]
        bias = None if bias is None else bias.contiguous()
        return kernel.fp8_up_swiglu_blocks(*tensors, bias=bias, activation=Activation.of(alpha, limit))
    z = reference.finish(reference.fp8_product(rows, row_scale, weight, weight_scale, offsets), bias, None, offsets)
    return z, *_quantised(activation_slopes(z, alpha, limit)[0])


@fp8_up_swiglu_blocks.register_fake
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
    num_rows, f = rows.shape[0], weight.shape[1] // 2
    z = rows.new_empty(num_rows, 2 * f, dtype=torch.bfloat16)
    return z, rows.new_empty(num_rows, f), row_scale.new_empty(f // BLOCK, num_rows)
