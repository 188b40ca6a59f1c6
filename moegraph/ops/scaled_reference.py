"""Products of scaled 8-bit operands in plain torch: what the kernels are measured against, and what runs elsewhere.

FP8 elements are exact in bf16 and fp32, and so is an element times the power of two that an MX block has for a scale.
On CPU everything is multiplied in fp32; on other devices in bf16, by the grouped product of `grouped_mm`.

Legend: R routed rows, E experts, N output width, K contraction, P padded rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moegraph.ops.grouped_mm import product

MX_BLOCK = 32  # elements along the contraction that share a scale
SCALE_ROWS = 128  # rows of a block of swizzled scales, and 4 of its columns: 128 of the contraction


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


def scale_blocks(num_rows: int, num_experts: int) -> int:
    """Blocks of swizzled scales for R rows over E experts, at most, whatever the routing."""
    return -(-num_rows // SCALE_ROWS) + num_experts


def scale_places(num_rows: int, offsets: Tensor) -> Tensor:
    """[R] int64: a row's place among the padded rows of grouped scales, where every expert starts a new block."""
    starts = torch.cat((offsets.new_zeros(1), offsets[:-1])).long()
    blocks = (offsets.long() - starts + SCALE_ROWS - 1) // SCALE_ROWS
    first = (blocks.cumsum(0) - blocks) * SCALE_ROWS
    expert = expert_of_rows(num_rows, offsets)
    return torch.arange(num_rows, device=offsets.device) - starts[expert] + first[expert]


def swizzle(scale: Tensor) -> Tensor:
    """Scales [..., N, K/32] uint8 → [..., 128 · ⌈N/128⌉, 4 · ⌈K/128⌉], in the order that tensor cores read.

    Blocks of 128 rows and 4 columns are 512 bytes each and follow row by row. Within one, the byte of (r, c) lies at
    (r % 32) · 16 + (r // 32) · 4 + c; what pads a block is zero.
    (PTX ISA, tcgen05, scale factors; cuBLAS, block scaling layout.)
    """
    *front, n, columns = scale.shape
    rows, cols = -(-n // SCALE_ROWS), -(-columns // 4)
    padded = scale.new_zeros(*front, rows * SCALE_ROWS, cols * 4)
    padded[..., :n, :columns] = scale
    blocks = padded.view(*front, rows, 4, 32, cols, 4)
    return blocks.movedim(-2, -4).transpose(-3, -2).reshape(*front, rows * SCALE_ROWS, cols * 4)


def swizzle_grouped(scale: Tensor, offsets: Tensor) -> Tensor:
    """Scales [R, K/32] of rows sorted by expert → [128 · B, 4 · ⌈K/128⌉], B = ⌈R/128⌉ + E.

    Each expert starts a new block. Nothing waits for the device. Rows past the last offset have no place.
    """
    num_rows, columns = scale.shape
    blocks = scale_blocks(num_rows, offsets.shape[0])
    padded = scale.new_zeros(blocks * SCALE_ROWS + 1, columns)
    rows = torch.where(real_rows(num_rows, offsets)[:, 0], scale_places(num_rows, offsets), blocks * SCALE_ROWS)
    padded.index_copy_(0, rows, scale)
    return swizzle(padded[:-1])


def unswizzle(scale: Tensor) -> Tensor:
    """[..., 128 · B, 4 · C] swizzled → the same shape in rows and columns, padding included."""
    *front, rows, cols = scale.shape
    blocks = scale.reshape(*front, rows // SCALE_ROWS, cols // 4, 32, 4, 4)
    return blocks.transpose(-3, -2).movedim(-4, -2).reshape(*front, rows, cols)


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
        places = scale_places(rows.shape[0], offsets).clamp_(max=row_scale.shape[0] - 1)
        row_scale = unswizzle(row_scale)[places, :columns]
        weight_scale = unswizzle(weight_scale)[:, : weight.shape[1], :columns]
    wide = wide_dtype(rows.device)
    left, right = mx_dequantise(rows, row_scale, wide), mx_dequantise(weight, weight_scale, wide)
    return product(left, right, offsets).float()
