"""Which configurations are worth trying for a shape: the rule's first, then those that change ever more of it.

Left out before anything is compiled: what exceeds the chip's shared memory by the estimate, tiles wider than the
output needs, accumulators that do not fit in registers (or, on 10.x, in tensor memory), and slices of an epilogue
narrower than 32 columns. What remains may still spill; only compiling tells.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple
from itertools import product

import torch

from moegraph.kernels.chips import CHIPS
from moegraph.kernels.config import FP8, Config, default_config, shared_memory

_ACCUMULATORS = 128  # fp32 registers per thread that a tile's accumulator may take, of 255
_TENSOR_MEMORY = 512  # columns of 128 lanes, 32 bits each
_GROUPS = (4, 8, 16)
_STORES = [(parts, flatten, False) for parts in (1, 2) for flatten in (False, True)]
# (parts, flatten, separate) per kernel; flattened, the fused gradient of the activation spills.
_EPILOGUES = {
    "up_swiglu": [(1, False, False), (1, False, True), (1, True, True)],
    "grouped_mm": _STORES,
    "grouped_mm_dgrad": _STORES,
    "dgrad_swiglu": [(1, False, False), (2, False, False), (4, False, False)]
    + [(parts, flatten, True) for parts, flatten, _ in _STORES],
    "wgrad": [(1, False, False), (1, True, False)],
}


_FP8_SLICED = ("up_swiglu", "wgrad")  # kernels whose epilogue works in slices for FP8 only


def candidates(kernel: str, dtype: torch.dtype, n: int, k: int, capability: int) -> list[Config]:
    """The configurations to try for `kernel` at n and k on a chip (a key of `CHIPS`), the rule's first; the others by
    how many choices they change, so that a short budget covers the neighbourhood of the rule."""
    rule = default_config(kernel, dtype, n, k, capability)
    others = {each for each in _all(kernel, dtype) if _fits(kernel, each, dtype, n, k, capability)} - {rule}
    return [rule, *sorted(others, key=lambda each: (changes(each, rule), astuple(each)))]


def changes(config: Config, other: Config) -> int:
    """How many choices differ."""
    return sum(a != b for a, b in zip(astuple(config), astuple(other), strict=True))


def _all(kernel: str, dtype: torch.dtype) -> Iterator[Config]:
    small = dtype == torch.float32
    rows, columns = ((16, 32, 64), (32, 64, 128)) if small else ((64, 128, 256), (64, 128, 256))
    depths = (16, 32, 64) if small else (64, 128) if dtype == FP8 else (32, 64, 128)
    for (parts, flatten, separate), m, n, k, warps, stages, group in product(
        _STORES if dtype == FP8 and kernel in _FP8_SLICED else _EPILOGUES[kernel],
        rows,
        columns,
        depths,
        (4, 8),
        (2, 3, 4, 5),
        _GROUPS,
    ):
        yield Config(m, n, k, warps, stages, group, parts, flatten, separate)


def _fits(kernel: str, c: Config, dtype: torch.dtype, n: int, k: int, capability: int) -> bool:
    chip = CHIPS[capability]
    rows, columns, depth = _most(kernel, n, k)
    accumulators = c.block_m * c.block_n // (32 * c.num_warps)
    tensor_memory = max(c.block_m // 128, 1) * c.block_n
    return (
        c.block_m <= rows
        and c.block_n <= columns
        and c.block_k <= depth
        and c.block_n // c.parts >= 32
        and accumulators <= _ACCUMULATORS
        and (capability // 10 != 10 or dtype == torch.float32 or tensor_memory <= _TENSOR_MEMORY)
        and shared_memory(kernel, c, dtype, capability) <= chip.shared_limit
    )


def _most(kernel: str, n: int, k: int) -> tuple[int, int, int]:
    """The largest block_m, block_n and block_k that the sizes can fill."""
    wide, deep = max(_power(n), 64), max(_power(k), 32)
    if kernel == "wgrad":  # a tile is of dW [n, k]; the contraction is over rows
        return wide, max(deep, 64), 128
    return 256, 2 * wide if kernel == "up_swiglu" else wide, deep


def _power(size: int) -> int:
    return 1 << (size - 1).bit_length()
