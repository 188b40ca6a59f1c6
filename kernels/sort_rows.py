"""Rows sorted by expert: where every choice goes, found on the device in three launches, stable and without atomics.

    order    the slots, those of expert 0 first, within an expert in their own order; dropped slots last
    inverse  inverse[order[r]] = r
    offsets  offsets[e] = the end of expert e's rows

1. count: how many of each block's slots chose each expert.
2. scan: for each expert the running sum over blocks.
3. place: each block sorts its slots by (expert, slot); one that is the i-th of its block goes to row
   i + (rows of lower experts) + (rows of its expert in earlier blocks) - (slots of lower experts in its block).

A choice outside 0 … E-1 is a dropped slot; it counts as expert E.

Legend: T tokens, E experts, K top-k, R = T·K slots (and rows), B slots per block, N blocks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moegraph.kernels.config import Config
from moegraph.kernels.launch import Launch

MAX_EXPERTS = 1024
_SCAN = Config(block_m=1024, num_warps=4)


def default_block(num_experts: int) -> Config:
    """As many slots per block as there are experts, but no fewer than 512: the counts stay no larger than the ids."""
    return Config(block_m=max(512, triton.next_power_of_2(num_experts)), num_warps=4)


@triton.jit
def load_expert(ids_ptr, slot, num_slots, E: tl.constexpr):
    """The experts that slots chose; E for those dropped and those that are not there."""
    expert = tl.load(ids_ptr + slot, mask=slot < num_slots, other=E)
    return tl.where((expert >= 0) & (expert < E), expert, E)


@triton.jit
def count_kernel(ids_ptr, ends_ptr, num_slots, num_blocks, E: tl.constexpr, E_PAD: tl.constexpr, BLOCK: tl.constexpr):
    """One block per program: its column of the counts [E + 1, N]."""
    block = tl.program_id(0)
    slot = block * BLOCK + tl.arange(0, BLOCK)
    counts = tl.histogram(load_expert(ids_ptr, slot, num_slots, E), E_PAD)
    e = tl.arange(0, E_PAD)
    tl.store(ends_ptr + e.to(tl.int64) * num_blocks + block, counts, mask=e <= E)


@triton.jit
def scan_kernel(ends_ptr, num_blocks, BLOCK: tl.constexpr):
    """One expert per program: its counts become their running sum, in place."""
    row = ends_ptr + tl.program_id(0).to(tl.int64) * num_blocks
    total = tl.zeros((), tl.int32)
    for first in range(0, num_blocks, BLOCK):
        n = first + tl.arange(0, BLOCK)
        counts = tl.load(row + n, mask=n < num_blocks, other=0)
        tl.store(row + n, total + tl.cumsum(counts, 0), mask=n < num_blocks)
        total += tl.sum(counts, 0)


@triton.jit
def place_kernel(
    ids_ptr,
    ends_ptr,
    order_ptr,
    inverse_ptr,
    offsets_ptr,
    num_slots,
    num_blocks,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block per program; the first also writes the offsets."""
    block = tl.program_id(0)
    e = tl.arange(0, E_PAD)
    column = ends_ptr + e.to(tl.int64) * num_blocks + block
    total = tl.load(column + (num_blocks - 1 - block), mask=e <= E, other=0)
    upto = tl.load(column, mask=e <= E, other=0)
    before = tl.load(column - 1, mask=(e <= E) & (block > 0), other=0)
    end = tl.cumsum(total, 0)
    tl.store(offsets_ptr + e, end, mask=(e < E) & (block == 0))
    here = upto - before
    start = end - total + before - (tl.cumsum(here, 0) - here)

    i = tl.arange(0, BLOCK)
    expert = load_expert(ids_ptr, block * BLOCK + i, num_slots, E)
    key = tl.sort(expert * BLOCK + i)
    slot = block * BLOCK + key % BLOCK
    row = tl.gather(start, key // BLOCK, 0) + i
    tl.store(order_ptr + row, slot, mask=slot < num_slots)
    tl.store(inverse_ptr + slot, row, mask=slot < num_slots)


def _constants(offsets: Tensor, config: Config) -> dict[str, int]:
    experts = offsets.shape[0]
    return {"E": experts, "E_PAD": max(triton.next_power_of_2(experts + 1), 32), "BLOCK": config.block_m}


def count_launch(ids: Tensor, offsets: Tensor, ends: Tensor, config: Config) -> Launch:
    """The launch that writes the counts `ends` [E + 1, N]."""
    blocks = ends.shape[1]
    arguments = {"ids_ptr": ids, "ends_ptr": ends, "num_slots": ids.numel(), "num_blocks": blocks}
    return Launch(count_kernel, (blocks,), arguments, _constants(offsets, config), config)


def scan_launch(ends: Tensor) -> Launch:
    """The launch that turns `ends` [E + 1, N] into its running sums along N."""
    arguments = {"ends_ptr": ends, "num_blocks": ends.shape[1]}
    return Launch(scan_kernel, (ends.shape[0],), arguments, {"BLOCK": _SCAN.block_m}, _SCAN)


def place_launch(ids: Tensor, ends: Tensor, order: Tensor, inverse: Tensor, offsets: Tensor, config: Config) -> Launch:
    """The launch that writes `order` [R], `inverse` [R] and `offsets` [E]."""
    blocks = ends.shape[1]
    results = {"order_ptr": order, "inverse_ptr": inverse, "offsets_ptr": offsets}
    arguments = {"ids_ptr": ids, "ends_ptr": ends, **results, "num_slots": ids.numel(), "num_blocks": blocks}
    return Launch(place_kernel, (blocks,), arguments, _constants(offsets, config), config)


def sort_by_expert(ids: Tensor, num_experts: int, *, config: Config | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Chosen experts ids [T, K] int32 → (order [R], inverse [R], offsets [E]), all int32.

    Raises ValueError for another dtype, more than 1024 experts, or so many slots that an int32 cannot number them.
    """
    c = default_block(num_experts) if config is None else config
    slots = ids.numel()
    if ids.dtype != torch.int32 or not 1 <= num_experts <= MAX_EXPERTS or slots > 2**31 - c.block_m:
        raise ValueError(
            f"{slots} {ids.dtype} choices of {num_experts} experts: fewer than 2³¹ int32, at most {MAX_EXPERTS} experts"
        )
    order, inverse = (torch.empty(slots, dtype=torch.int32, device=ids.device) for _ in range(2))
    offsets = torch.zeros(num_experts, dtype=torch.int32, device=ids.device)
    if slots:
        ends = torch.empty(num_experts + 1, triton.cdiv(slots, c.block_m), dtype=torch.int32, device=ids.device)
        ids = ids.contiguous()
        count_launch(ids, offsets, ends, c).run()
        scan_launch(ends).run()
        place_launch(ids, ends, order, inverse, offsets, c).run()
    return order, inverse, offsets
