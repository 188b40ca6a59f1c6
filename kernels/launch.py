"""A launch as data: the same description runs a kernel here and compiles it for a chip that is not here.

What a Triton kernel is compiled to depends on its arguments: dtypes, block shapes of descriptors, which pointers and
integers are multiples of 16, which integers are 1. Compiled without those facts it is another kernel. So a launch is
built once, by the function that users call, and `run` and `compiled.compile_launch` both read it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from moegraph.kernels.config import Config

if TYPE_CHECKING:
    from moegraph.kernels.tiles import Schedule

_INTERPRETED_PROGRAMS = 3  # enough to exercise a persistent loop; the interpreter runs programs one after another


@dataclass(frozen=True)
class Launch:
    """One kernel launch. `arguments` are tensors, tensor descriptors and integers; `constants` are compile-time."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    constants: Mapping[str, Any]
    config: Config

    def run(self) -> None:
        """Launches it on the current stream; nothing waits."""
        c = self.config
        self.kernel[self.grid](**self.arguments, **self.constants, num_warps=c.num_warps, num_stages=c.num_stages)


@functools.lru_cache(maxsize=16)
def persistent_programs(device: torch.device) -> int:
    """One program per multiprocessor (a stand-in where there is no device: the interpreter, a compilation)."""
    if device.type != "cuda":
        return _INTERPRETED_PROGRAMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def dot_precision(dtype: torch.dtype) -> str:
    """`tl.dot`'s input precision: fp32 in full; for bf16 the word has no effect."""
    return "ieee" if dtype == torch.float32 else "tf32"


def schedule_arguments(schedule: Schedule) -> dict[str, Any]:
    """What every product over a schedule is told about its rows."""
    return {
        "expert_ptr": schedule.expert,
        "first_ptr": schedule.first,
        "last_ptr": schedule.last,
        "count_ptr": schedule.num_tiles,
    }


def tile_constants(config: Config, programs: int, dtype: torch.dtype) -> dict[str, Any]:
    """What every product is compiled with."""
    return {
        "PROGRAMS": programs,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "GROUP_M": config.group_m,
        "PRECISION": dot_precision(dtype),
    }


@triton.jit
def tile_of(t, num_m, num_n, GROUP_M: tl.constexpr):
    """Block row and column of tile t: GROUP_M block rows at a time, so that their weights stay in L2."""
    width = GROUP_M * num_n
    group = t // width
    top = group * GROUP_M
    size = tl.minimum(num_m - top, GROUP_M)
    return top + (t % width) % size, (t % width) // size


@triton.jit
def load_rows(desc, first, last, col, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Rows `first …` of a ragged descriptor [R, C], [ROWS, COLS]; those at or past `last`, and columns past C, are
    zeros. (What `triton.tools.ragged_tma` offers, in the terms of a schedule, with an explicit shape.)"""
    big: tl.constexpr = 0x40000000
    return desc.load([big, last, big + first - last, col]).reshape(ROWS, COLS)


@triton.jit
def load_half(desc, first, last, half, col, ROWS: tl.constexpr, COLS: tl.constexpr):
    """`load_rows` from one half of rows that hold [gate | up]: a ragged descriptor [R, 2, F]."""
    big: tl.constexpr = 0x40000000
    return desc.load([big, last, big + first - last, half, col]).reshape(ROWS, COLS)


@triton.jit
def store_rows(desc, first, last, col, data, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Writes data [ROWS, COLS] to rows `first …` of a ragged descriptor [R, C]; rows at or past `last`, and columns
    past C, are dropped by the bounds check of the store."""
    big: tl.constexpr = 0x40000000
    desc.store([big, last, big + first - last, col], tl.reshape(data, (1, 1, ROWS, COLS)))


@triton.jit
def store_half(desc, first, last, half, col, data, ROWS: tl.constexpr, COLS: tl.constexpr):
    """`store_rows` into one half of rows that hold [gate | up]: a ragged descriptor [R, 2, F], so that a tile past F
    does not run into the other half."""
    big: tl.constexpr = 0x40000000
    desc.store([big, last, big + first - last, half, col], tl.reshape(data, (1, 1, ROWS, 1, COLS)))
