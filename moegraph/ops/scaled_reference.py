"""Products of scaled 8-bit operands in plain torch: what the kernels are measured against, and what runs elsewhere.

FP8 elements are exact in bf16 and fp32, and so is an element times the power of two that an MX block has for a scale.
On CPU everything is multiplied in fp32; on other devices in bf16, by the grouped product of `grouped_mm`.

Legend: R routed rows, E experts, N output width, K contraction, P padded rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moegraph.ops.grouped_mm import product
from moegraph.ops.mx_scales import padded_place, unswizzle_scales

MX_BLOCK = 32  # elements along the contraction that share a scale


def wide_dtype(device: torch.device) -> torch.dtype:
    """What the operands are multiplied in on a device."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def real_rows(num_rows: int, offsets: Tensor) -> Tensor:
    """[R, 1] bool: which rows lie before the last offset."""
    return (torch.arange(num_rows, device=offsets.device) < offsets[-1])[:, None]


def expert_of_rows(num_rows: int, offsets: Tensor) -> Tensor:
    """[R] int64: the expert of each row; the last one for rows past the last offset."""
    rows = torch.arange(num_rows, device=offsets.device, dtype=offsets.dtype)
    return torch.searchsorted(offsets, rows, right=True).clamp_(max=offsets.shape[0] - 1)


def fp8_product(rows: Tensor, row_scale: Tensor, weight: Tensor, weight_scale: Tensor, offsets: Tensor) -> Tensor:
    """rows [R, K] and weight [E, N, K] FP8 with fp32 scales [R] and [E, N] → [R, N] fp32; zero past the last offset."""
    wide = wide_dtype(rows.device)
    out = product(rows.to(wide), weight.to(wide), offsets).float()
    by_column = weight_scale.index_select(0, expert_of_rows(rows.shape[0], offsets))
    return torch.where(real_rows(rows.shape[0], offsets), out * row_scale[:, None] * by_column, 0.0)


def finish(out: Tensor, bias: Tensor | None, row_weight: Tensor | None, offsets: Tensor) -> Tensor:
    """out [R, N] fp32 plus the bias [E, N] of a row's expert, times row_weight [R] → bf16."""
    real = real_rows(out.shape[0], offsets)
    if bias is not None:
        out = torch.where(real, out + bias.index_select(0, expert_of_rows(out.shape[0], offsets)).float(), 0.0)
    if row_weight is not None:
        out = torch.where(real, out * row_weight[:, None], 0.0)
    return out.to(torch.bfloat16)


def fp8_wgrad(grad_t: Tensor, grad_scale: Tensor, rows_t: Tensor, rows_scale: Tensor, offsets: Tensor) -> Tensor:
    """grad_t [N, P], rows_t [K, P] FP8 with scales [E, N] and [E, K] → [E, N, K] bf16; zero for empty runs.

    One product per expert, so on CUDA it waits for the device.
    """
    out = grad_scale.new_zeros(offsets.shape[0], grad_t.shape[0], rows_t.shape[0], dtype=torch.bfloat16)
    wide, ends = wide_dtype(grad_t.device), offsets.tolist()
    for expert, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        if end > start:
            made = grad_t[:, start:end].to(wide) @ rows_t[:, start:end].to(wide).t()
            out[expert] = (made.float() * grad_scale[expert][:, None] * rows_scale[expert]).to(torch.bfloat16)
    return out


def mx_dequantise(data: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """data [..., K] FP8 and scales [..., K/32] uint8, the exponent plus 127, 255 for NaN → [..., K] in `dtype`."""
    power = torch.exp2(scale.to(torch.float32) - 127.0).masked_fill(scale == 255, float("nan"))
    spread = power.repeat_interleave(MX_BLOCK, dim=-1)[..., : data.shape[-1]]
    return (data.to(torch.float32) * spread).to(dtype)


def mx_product(
    rows: Tensor, row_scale: Tensor, weight: Tensor, weight_scale: Tensor, offsets: Tensor, swizzled: bool
) -> Tensor:
    """rows [R, K] and weight [E, N, K] FP8 with MX scales → [R, N] fp32; zero past the last offset."""
    columns = rows.shape[1] // MX_BLOCK
    if swizzled:
        places = padded_place(offsets, rows.shape[0]).clamp_max(row_scale.shape[0] - 1)
        row_scale = unswizzle_scales(row_scale, row_scale.shape[0], columns)[places]
        weight_scale = unswizzle_scales(weight_scale, weight.shape[1], columns)
    wide = wide_dtype(rows.device)
    left, right = mx_dequantise(rows, row_scale, wide), mx_dequantise(weight, weight_scale, wide)
    return product(left, right, offsets).float()
