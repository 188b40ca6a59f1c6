"""Which tile of which expert: the schedule of a ragged product, made on the device.

Rows are sorted by expert; `offsets[e]` is the end of expert e's rows. A ragged product is cut into blocks of `block_m`
rows that never cross an expert. How many there are depends on the routing, but never more than R / block_m + E + 1, so
the arrays have that length and the true number is a device scalar: the host never waits. Rows past the last offset
are in no block, or with `tail` in blocks of the pseudo-expert E behind all others.

No atomics: every program adds up the blocks of the experts before its own, so the schedule is the same bits every time.

Legend: E experts, R rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moegraph.kernels.config import Config
from moegraph.kernels.launch import Launch

_BLOCK = 128
_CONFIG = Config(num_warps=4)


class Schedule(NamedTuple):
    """Per row block its expert, its first row and where its expert's rows end, int32 [max_tiles] each, and how many
    blocks there are, int32 [1]."""

    expert: Tensor
    first: Tensor
    last: Tensor
    num_tiles: Tensor


def max_tiles(rows: int, num_experts: int, block_m: int) -> int:
    """An upper bound of the number of row blocks, known on the host."""
    return rows // block_m + num_experts + 1


def tile_schedule_reference(offsets: Tensor, rows: int, block_m: int, *, tail: bool = False) -> Schedule:
    """The schedule in plain torch, on the host."""
    ends = [*offsets.tolist(), *[rows] * tail]
    starts = [0, *ends[:-1]]
    tiles = [
        (e, r, end) for e, (start, end) in enumerate(zip(starts, ends, strict=True)) for r in range(start, end, block_m)
    ]
    empty = max_tiles(rows, offsets.numel(), block_m) - len(tiles)
    columns = torch.tensor(tiles + [(0, 0, 0)] * empty, dtype=torch.int32, device=offsets.device)
    count = torch.tensor([len(tiles)], dtype=torch.int32, device=offsets.device)
    expert, first, last = columns.t().contiguous()
    return Schedule(expert, first, last, count)


@triton.jit
def tile_schedule_kernel(
    offsets_ptr,
    expert_ptr,
    first_ptr,
    last_ptr,
    count_ptr,
    rows,
    limit,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
    TAIL: tl.constexpr,
):
    """One program per expert and one for the rows past the last offset, which also clears the unused entries."""
    e = tl.program_id(0)
    each = tl.arange(0, E_PAD)
    ends = tl.load(offsets_ptr + each, mask=each < E, other=0)
    begins = tl.load(offsets_ptr + each - 1, mask=(each > 0) & (each < E), other=0)
    blocks = (ends - begins + BLOCK_M - 1) // BLOCK_M
    before = tl.sum(tl.where(each < e, blocks, 0), 0)
    begin = tl.load(offsets_ptr + e - 1, mask=e > 0, other=0)
    end = tl.load(offsets_ptr + e, mask=e < E, other=rows)
    mine = (end - begin + BLOCK_M - 1) // BLOCK_M
    if not TAIL:
        mine = tl.where(e < E, mine, 0)
    for done in range(0, mine, BLOCK):
        i = done + tl.arange(0, BLOCK)
        tl.store(expert_ptr + before + i, tl.zeros_like(i) + e, mask=i < mine)
        tl.store(first_ptr + before + i, begin + i * BLOCK_M, mask=i < mine)
        tl.store(last_ptr + before + i, tl.zeros_like(i) + end, mask=i < mine)
    if e == E:
        total = before + mine
        tl.store(count_ptr, total)
        for unused in range(total, limit, BLOCK):
            i = unused + tl.arange(0, BLOCK)
            nothing = tl.zeros_like(i)
            tl.store(expert_ptr + i, nothing, mask=i < limit)
            tl.store(first_ptr + i, nothing, mask=i < limit)
            tl.store(last_ptr + i, nothing, mask=i < limit)


def tile_schedule_launch(offsets: Tensor, rows: int, block_m: int, schedule: Schedule, *, tail: bool = False) -> Launch:
    """The launch that fills `schedule`."""
    experts = offsets.shape[0]
    names = ("expert_ptr", "first_ptr", "last_ptr", "count_ptr")
    arguments = {"offsets_ptr": offsets, **dict(zip(names, schedule, strict=True)), "rows": rows}
    arguments["limit"] = schedule.expert.shape[0]
    padded = triton.next_power_of_2(experts)
    constants = {"E": experts, "E_PAD": padded, "BLOCK_M": block_m, "BLOCK": _BLOCK, "TAIL": tail}
    return Launch(tile_schedule_kernel, (experts + 1,), arguments, constants, _CONFIG)


def tile_schedule(offsets: Tensor, rows: int, block_m: int, *, tail: bool = False) -> Schedule:
    """The schedule for `offsets` [E] int32 and R = `rows`; with `tail`, of the rows past the last offset too."""
    limit = max_tiles(rows, offsets.shape[0], block_m)
    out = torch.empty(3 * limit + 1, dtype=torch.int32, device=offsets.device)
    found = Schedule(out[:limit], out[limit : 2 * limit], out[2 * limit : 3 * limit], out[3 * limit :])
    tile_schedule_launch(offsets, rows, block_m, found, tail=tail).run()
    return found
