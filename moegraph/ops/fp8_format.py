"""FP8 with one fp32 scale per row, or per column of an expert, in plain torch: what Hopper's products scale by.

Elements are E4M3 (largest 448). With the amax of what shares a scale, in fp32:

    scale = amax / 448        data = x · (448 / amax), saturated at ±448, nearest even        x ≈ data · scale

each quotient rounded once; 448 / amax is at most the largest fp32. amax 0: scale 1, data ±0. A NaN or Inf gives scale
NaN and data NaN to all that share the scale: what is decoded is NaN. NaN is written as byte 0x7F.

Ragged rows, tiles and padded rows are those of `mx_scales`: R' = (ceil(R / 128) + E) · 128.

Legend: R rows, R' padded rows, E experts, K columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moegraph.ops.mx_format import E4M3_MAX, INPUTS, magnitude_bits, to_e4m3
from moegraph.ops.mx_scales import pad_rows, padded_offsets, zero_past

_INFINITE = 0x7F800000


def check_fp8_input(x: Tensor) -> None:
    """Raises ValueError for a dtype that FP8 is not made of here."""
    if x.dtype not in INPUTS:
        raise ValueError(f"FP8 is made of {', '.join(map(str, INPUTS))}, not {x.dtype}")


def _scale_and_factor(amax_bits: Tensor) -> tuple[Tensor, Tensor]:
    amax = amax_bits.view(torch.float32)
    finite = torch.where(amax_bits < _INFINITE, amax, torch.nan)
    largest = torch.full_like(amax, E4M3_MAX)  # a tensor: with a number, torch multiplies by a rounded reciprocal
    scale = torch.where(amax_bits == 0, 1.0, finite / largest)
    return scale, (largest / finite).clamp_max(torch.finfo(torch.float32).max)


def quantize_rows(x: Tensor, offsets: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x [.., K] bf16, fp16 or fp32 → (data [.., K] float8_e4m3fn, scale [..] fp32).

    With offsets, x is [R, K] and rows past the last offset do not exist: data 0, scale 1, whatever they hold.
    Raises ValueError for another dtype.
    """
    check_fp8_input(x)
    if offsets is not None:
        x = zero_past(x, offsets)
    x = x.contiguous()  # as results are, whatever x is a view of
    scale, factor = _scale_and_factor(magnitude_bits(x).amax(-1))
    return to_e4m3(x.float() * factor.unsqueeze(-1)), scale


def quantize_columns_t(x: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x [R, K] bf16, fp16 or fp32, offsets [E] → (data [K, R'] float8_e4m3fn, scale [E, K] fp32, padded [E] int32).

    data is transposed: each expert's rows, padded with zeros to a multiple of 128, are columns padded[e-1] …
    padded[e]; columns past padded[-1] are zero. An expert without rows has scale 1. Raises ValueError for another
    dtype.
    """
    check_fp8_input(x)
    rows, experts = x.shape[0], offsets.shape[0]
    row = torch.arange(rows, dtype=torch.int32, device=x.device)
    expert = torch.searchsorted(offsets, row, right=True)[:, None].expand_as(x)
    bits = torch.zeros(experts + 1, x.shape[1], dtype=torch.int32, device=x.device)
    bits = bits.scatter_reduce(0, expert, magnitude_bits(x), "amax")[:experts]
    scale, factor = _scale_and_factor(bits)
    factor = torch.cat((factor, factor.new_zeros(1, x.shape[1])))
    data = to_e4m3(zero_past(x, offsets).float() * factor.gather(0, expert)).view(torch.uint8)
    padded = pad_rows(data, offsets).t().contiguous()
    return padded.view(torch.float8_e4m3fn), scale, padded_offsets(offsets)
