"""Which tile of which expert: the schedule of a ragged product, made on the device.

Rows are sorted by expert; `offsets[e]` is the end of expert e's rows. A ragged product is cut into blocks of `block_m`
rows that never cross an expert. How many there are depends on the routing, but never more than R / block_m + E + 1, so
the arrays have that length and the true number is a device scalar: the host never waits. Rows past the last offset
make blocks of the pseudo-expert E, whose results are zero.

No atomics: every program sums the block counts for itself, so the schedule is the same bits every time.

Legend: E experts, R rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 128


class Schedule(NamedTuple):
    """Per row block its expert and first row, int32 [max_tiles], and how many blocks there are, int32 [1]."""

    expert: Tensor
    first: Tensor
    num_tiles: Tensor


def max_tiles(rows: int, num_experts: int, block_m: int) -> int:
    """An upper bound of the number of row blocks, known on the host."""
    return rows // block_m + num_experts + 1


def tile_schedule_reference(offsets: Tensor, rows: int, block_m: int) -> Schedule:
    """The schedule in plain torch, on the host."""
    ends = [*offsets.tolist(), rows]
    starts = [0, *ends[:-1]]
    tiles = [
        (e, r) for e, (start, end) in enumerate(zip(starts, ends, strict=True)) for r in range(start, end, block_m)
    ]
    empty = max_tiles(rows, offsets.numel(), block_m) - len(tiles)
    columns = torch.tensor(tiles + [(0, 0)] * empty, dtype=torch.int32, device=offsets.device)
    count = torch.tensor([len(tiles)], dtype=torch.int32, device=offsets.device)
    return Schedule(columns[:, 0].contiguous(), columns[:, 1].contiguous(), count)


@triton.jit
def tile_schedule_kernel(
    offsets_ptr,
    expert_ptr,
    first_ptr,
    count_ptr,
    rows,
    limit,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program fills BLOCK entries."""
    e = tl.arange(0, E_PAD)
    end = tl.load(offsets_ptr + e, mask=e < E, other=0)
    end = tl.where(e == E, rows, end)
    start = tl.load(offsets_ptr + e - 1, mask=(e > 0) & (e <= E), other=0)
    blocks = tl.where(e <= E, (end - start + BLOCK_M - 1) // BLOCK_M, 0)
    ends = tl.cumsum(blocks, 0)
    total = tl.sum(blocks, 0)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    before = (ends[None, :] <= i[:, None]) & (e <= E)[None, :]
    expert = tl.sum(before.to(tl.int32), 1)
    skipped = tl.sum(tl.where(before, blocks[None, :], 0), 1)
    begin = tl.load(offsets_ptr + expert - 1, mask=(expert > 0) & (expert <= E), other=0)
    inside = i < total
    tl.store(expert_ptr + i, tl.where(inside, expert, 0), mask=i < limit)
    tl.store(first_ptr + i, tl.where(inside, begin + (i - skipped) * BLOCK_M, 0), mask=i < limit)
    tl.store(count_ptr + i, tl.zeros_like(i) + total, mask=i == 0)


def tile_schedule(offsets: Tensor, rows: int, block_m: int) -> Schedule:
    """The schedule for `offsets` [E] int32 and R = `rows`."""
    experts = offsets.numel()
    limit = max_tiles(rows, experts, block_m)
    out = torch.empty(2 * limit + 1, dtype=torch.int32, device=offsets.device)
    found = Schedule(out[:limit], out[limit : 2 * limit], out[2 * limit :])
    tile_schedule_kernel[(triton.cdiv(limit, _BLOCK),)](
        offsets,
        *found,
        rows,
        limit,
        E=experts,
        E_PAD=triton.next_power_of_2(experts + 1),
        BLOCK_M=block_m,
        BLOCK=_BLOCK,
    )
    return found
