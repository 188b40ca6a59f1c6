"""MXFP8: FP8 numbers that share one power of two among 32 neighbours, in plain torch. The reference of the kernels.

The format is the OCP Microscaling specification v1.0: elements E4M3 (largest 448, no infinities), one scale E8M0 per
block of 32, byte b for 2^(b - 127), byte 255 for NaN. An element is its E4M3 value times its block's scale.

A block's scale comes from the integer bits of its amax, the largest magnitude, in fp32:

    rceil  2^ceil(log2(amax / 448)): nothing saturates. NVIDIA's recipe; default
    floor  2^(floor(log2 amax) - 8): magnitudes above 448 · scale saturate. The text of OCP, to compare with others

and its elements are x / scale, clamped to ±448, rounded to nearest even. Blocks out of the ordinary, as NVIDIA and
torchao have them:

| block | rceil | floor |
| --- | --- | --- |
| only zeros | scale 0, data ±0 | scale 0, data ±0 |
| amax ≤ 1.75 · 2^-119, floor: < 2^-118 | scale 0, data ±0: flushed | scale 0, data x · 2^126, not x · 2^127 |
| with NaN | scale 255, all data NaN | scale 255, NaN where x is not finite, else ±0 |
| with Inf, without NaN | scale 254, ±448 for Inf, else x · 2^-127 | scale 247, ±448 for Inf, else x · 2^-120 |

So a block with NaN decodes to NaN throughout. One with Inf decodes to Inf where it was, in fp32 and bf16, but what is
smaller than 2^117 (`rceil`) or 2^110 (`floor`) around it becomes 0 without a NaN: test finiteness before quantising.
NaN is written as byte 0x7F. Where `floor` gives scale 0, half of what went in comes out: torchao does so, and those are
its bytes.

Legend: N rows, K columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 32  # elements that share a scale
E4M3_MAX = 448.0
INPUTS = (torch.bfloat16, torch.float16, torch.float32)
ROUNDINGS = ("rceil", "floor")

_INFINITE = 0x7F800000  # bits of fp32 infinity; NaN is above
_MAGNITUDE = 0x7FFFFFFF
_NAN_BYTE = 0x7F
_MANTISSA_OF_448 = 0x600000  # 448 = 1.75 · 2^8


def magnitude_bits(x: Tensor) -> Tensor:
    """|x| in fp32 as int32 bits: ordered as the magnitudes are, with NaN above infinity."""
    return x.float().view(torch.int32) & _MAGNITUDE


def to_e4m3(x: Tensor) -> Tensor:
    """fp32 → float8_e4m3fn: clamped to ±448 (torch 2.11 gives NaN beyond), nearest even, NaN as byte 0x7F."""
    byte = x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(x.isnan(), _NAN_BYTE, byte).view(torch.float8_e4m3fn)


def scale_of(amax_bits: Tensor, rounding: str = "rceil") -> Tensor:
    """int32 bits of each block's fp32 amax → its E8M0 byte, uint8."""
    exponent, mantissa = amax_bits >> 23, amax_bits & 0x7FFFFF
    if rounding == "rceil":
        byte = exponent - 8 + (mantissa > _MANTISSA_OF_448)
        byte = torch.where(amax_bits == _INFINITE, 254, byte)
    else:
        byte = exponent - 8
    return torch.where(amax_bits > _INFINITE, 255, byte.clamp_min(0)).to(torch.uint8)


def decode_scale(scale: Tensor) -> Tensor:
    """E8M0 bytes → fp32: 2^(b - 127), of which byte 0 is subnormal in fp32; 255 → NaN."""
    b = scale.to(torch.int32)
    bits = torch.where(b == 0, 0x00400000, b << 23)
    return torch.where(b == 255, 0x7FC00000, bits).view(torch.float32)


def _factor(scale: Tensor, rounding: str) -> Tensor:
    """What elements are multiplied by, fp32: 2^(127 - b) but for the bytes of the table above."""
    b = scale.to(torch.int32)
    bits = torch.where(b == 254, 0x00400000, (254 - b) << 23)
    if rounding == "rceil":
        return torch.where(b == 255, torch.nan, torch.where(b == 0, 1.0, bits.view(torch.float32)))
    return torch.where(b == 255, 0.0, torch.where(b == 0, 2.0**126, bits.view(torch.float32)))


def check_mx_input(x: Tensor, axis: int | None) -> None:
    """Raises ValueError for a dtype that MXFP8 is not made of, and for a length along `axis` that is not a multiple
    of 32."""
    if x.dtype not in INPUTS:
        raise ValueError(f"MXFP8 is made of {', '.join(map(str, INPUTS))}, not {x.dtype}")
    if axis is not None:
        _check_axis(x, axis)


def _check_axis(x: Tensor, axis: int) -> None:
    if axis not in (-1, -2) or x.dim() < -axis:
        raise ValueError(f"axis {axis} of a tensor of shape {tuple(x.shape)}: -1 or -2 of one that has it")
    if x.shape[axis] % BLOCK:
        raise ValueError(
            f"MXFP8 shares scales among {BLOCK} elements: {x.shape[axis]} along axis {axis} of shape {tuple(x.shape)} "
            f"is not a multiple of {BLOCK}"
        )


def _blocks(x: Tensor, axis: int) -> Tensor:
    """x [.., N, K] as [.., N, K/32, 32] (axis -1) or [.., N/32, 32, K] (axis -2)."""
    _check_axis(x, axis)
    at = x.dim() + axis
    return x.reshape(*x.shape[:at], x.shape[at] // BLOCK, BLOCK, *x.shape[at + 1 :])


def mx_quantize(x: Tensor, axis: int = -1, *, rounding: str = "rceil") -> tuple[Tensor, Tensor]:
    """x [.., N, K] bf16, fp16 or fp32 → (data [.., N, K] float8_e4m3fn, scale uint8).

    axis -1: blocks along a row, scale [.., N, K/32]. axis -2: blocks of 32 rows, scale [.., N/32, K].
    Raises ValueError for another axis, dtype or rounding, and a length along the axis that is not a multiple of 32.
    """
    check_mx_input(x, axis)
    if rounding not in ROUNDINGS:
        raise ValueError(f"rounding {rounding!r}: one of {', '.join(ROUNDINGS)}")
    blocks = _blocks(x.contiguous(), axis)  # results are contiguous, whatever x is a view of
    scale = scale_of(magnitude_bits(blocks).amax(axis), rounding)
    data = to_e4m3(blocks.float() * _factor(scale, rounding).unsqueeze(axis))
    return data.reshape(x.shape), scale


def mx_dequantize(data: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16, axis: int = -1) -> Tensor:
    """What `mx_quantize` gave → [.., N, K] in `dtype`: data · 2^(scale - 127), in fp32 and rounded once.

    Exact in bf16 above 2^-126, as an element has 4 significant bits. Raises ValueError for shapes that do not match.
    """
    blocks = _blocks(data, axis)
    want = blocks.shape[:axis] + blocks.shape[blocks.dim() + axis + 1 :]
    if scale.shape != want:
        raise ValueError(
            f"data {tuple(data.shape)} along axis {axis} has scales {tuple(want)}, not {tuple(scale.shape)}"
        )
    return (blocks.float() * decode_scale(scale).unsqueeze(axis)).reshape(data.shape).to(dtype)
