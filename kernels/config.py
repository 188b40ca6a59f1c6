"""How a kernel is tiled: the choices that change its speed and never its result's meaning.

`default_config` is the rule for a dtype and shape; measured choices live in the tuning tables.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Config:
    """block_m rows by block_n columns per tile, block_k of the contraction per step; group_m row blocks share their
    weights in L2; parts is how many column slices an epilogue works in; flatten lets the next tile's loads start
    during an epilogue."""

    block_m: int = 128
    block_n: int = 256
    block_k: int = 64
    num_warps: int = 8
    num_stages: int = 3
    group_m: int = 8
    parts: int = 1
    flatten: bool = False


def _fit(size: int, most: int, least: int = 16) -> int:
    """The smallest power of two that covers `size`, between `least` and `most`."""
    block = least
    while block < size and block < most:
        block *= 2
    return block


def default_config(kernel: str, dtype: torch.dtype, n: int, k: int) -> Config:
    """The rule: n output columns (of the activation for up_swiglu), k the contraction (rows for wgrad's output).

    bf16 on Hopper and later: 128 × 256 × 64, eight warps (measured on H200, docs/performance.md). fp32 has no room
    for such tiles: 32 × 64 × 32.
    """
    if dtype == torch.float32:
        return Config(32, _fit(n, 64, 32), _fit(k, 32), num_warps=4, num_stages=2, parts=1)
    if kernel == "up_swiglu":
        return Config(block_n=2 * _fit(n, 128), block_k=_fit(k, 64))
    if kernel == "dgrad_swiglu":
        wide = _fit(n, 256, 64)
        return Config(block_n=wide, block_k=_fit(k, 64), parts=wide // 64)
    if kernel == "wgrad":
        return Config(block_m=_fit(n, 128), block_n=_fit(k, 256), block_k=64)
    return Config(block_n=_fit(n, 256), block_k=_fit(k, 64), flatten=True)
