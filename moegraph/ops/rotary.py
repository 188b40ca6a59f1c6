"""Rotary position embedding (arXiv 2104.09864)."""

from __future__ import annotations

import torch
from torch import Tensor

from moegraph.ops.precision import accumulate_dtype


def rope(
    x: Tensor, positions: Tensor, *, theta: float, rotary_dim: int | None = None, interleaved: bool = False
) -> Tensor:
    """Rotates pairs of x [B, S, H, Dh] by the angle positions[b, s] · theta^(-2i / rotary_dim).

    The first `rotary_dim` components (default: all) are rotated, the rest pass. Pair i is (i, i + rotary_dim/2), or
    (2i, 2i + 1) when `interleaved`; either way a component stays where it was. Angles, sines and products are float32
    (float64 for float64), rounded once to x's dtype.

    Raises ValueError for an odd `rotary_dim`, or one larger than Dh.
    """
    head_dim = x.shape[-1]
    rotary_dim = head_dim if rotary_dim is None else rotary_dim
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise ValueError(f"rope needs an even rotary_dim from 2 to head_dim {head_dim}, got {rotary_dim}")
    wide = accumulate_dtype(x.dtype)
    half = rotary_dim // 2
    exponent = torch.arange(0, rotary_dim, 2, dtype=wide, device=x.device) / rotary_dim
    angle = positions.to(wide)[:, :, None, None] * (1.0 / theta**exponent)
    cos, sin = torch.cos(angle), torch.sin(angle)

    rotated, rest = torch.split(x, [rotary_dim, head_dim - rotary_dim], dim=-1) if rotary_dim < head_dim else (x, None)
    pairs = (half, 2) if interleaved else (2, half)
    axis = -1 if interleaved else -2
    first, second = rotated.to(wide).reshape(*x.shape[:-1], *pairs).unbind(axis)
    turned = torch.stack((first * cos - second * sin, second * cos + first * sin), axis)
    turned = turned.reshape(*x.shape[:-1], rotary_dim).to(x.dtype)
    return turned if rest is None else torch.cat((turned, rest), dim=-1)
