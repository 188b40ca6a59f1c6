"""Where each slot's row goes among the experts' buffers of all ranks, found on the device in two launches.

    destination[s] = p·N + base[e] + (r - first row of e here)       r = inverse[s] and e its expert, owned by rank p

base[e] is where this rank's rows of expert e begin in its owner's buffer: after the rows of the owner's lower experts,
and after those of the same expert from lower ranks. So a buffer is sorted by (expert, source rank, slot) however its
rows arrive. A slot without a row, and one whose row does not fit into the N rows of a buffer, gets -1.

1. base: sums over ranks and running sums over experts, by one program; also the offsets of this rank's experts.
2. destination: each slot finds its expert by bisection.

Counts are [P, E + 1] int32: rank s has counts[s, e] rows for expert e; the last column is the number of this rank.

Legend: P ranks of the group, E experts, L = E/P experts of a rank, R slots, N rows of a buffer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moegraph.kernels.config import Config
from moegraph.kernels.launch import Launch

_BLOCK = 1024
_CONFIG = Config(num_warps=4)


@triton.jit
def base_kernel(
    counts_ptr,
    base_ptr,
    local_offsets_ptr,
    lost_ptr,
    capacity,
    P: tl.constexpr,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
):
    """One program. lost: how many rows of this rank find no place in their owners' buffers."""
    local: tl.constexpr = E // P
    e = tl.arange(0, E_PAD)
    rank = tl.load(counts_ptr + E)
    total = tl.zeros((E_PAD,), tl.int32)
    earlier = tl.zeros((E_PAD,), tl.int32)
    for s in range(P):
        counts = tl.load(counts_ptr + s * (E + 1) + e, mask=e < E, other=0)
        total += counts
        earlier += tl.where(s < rank, counts, 0)
    end = tl.cumsum(total, 0)
    first = tl.minimum(e // local * local, E_PAD - 1)  # the first expert of the same owner
    before_owner = tl.gather(end - total, first, 0)
    base = end - total - before_owner + earlier
    tl.store(base_ptr + e, base, mask=e < E)
    mine = (e < E) & (e // local == rank)
    tl.store(local_offsets_ptr + (e - rank * local), tl.minimum(end - before_owner, capacity), mask=mine)
    own = tl.load(counts_ptr + rank * (E + 1) + e, mask=e < E, other=0)
    lost = tl.minimum(own, tl.maximum(base + own - capacity, 0))
    tl.store(lost_ptr, tl.sum(lost.to(tl.int64), 0))


@triton.jit
def destination_kernel(
    inverse_ptr,
    offsets_ptr,
    base_ptr,
    destination_ptr,
    num_slots,
    capacity,
    P: tl.constexpr,
    E: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK slots per program. STEPS halvings find the one of E experts."""
    local: tl.constexpr = E // P
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = slot < num_slots
    row = tl.load(inverse_ptr + slot, mask=inside, other=0)
    exists = inside & (row < tl.load(offsets_ptr + E - 1))
    low = tl.zeros((BLOCK,), tl.int32)  # the expert is the first whose offset is larger than the row
    high = tl.full((BLOCK,), E - 1, tl.int32)
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        upper = tl.load(offsets_ptr + middle) <= row
        low = tl.where(upper, tl.minimum(middle + 1, high), low)
        high = tl.where(upper, high, middle)
    expert = low
    start = tl.load(offsets_ptr + expert - 1, mask=expert > 0, other=0)
    place = tl.load(base_ptr + expert) + row - start
    there = expert // local * capacity + place
    tl.store(destination_ptr + slot, tl.where(exists & (place < capacity), there, -1), mask=inside)


def base_launch(counts: Tensor, base: Tensor, local_offsets: Tensor, lost: Tensor, capacity: int) -> Launch:
    """The launch that writes `base` [E] int32, `local_offsets` [L] int32 and `lost` [] int64."""
    ranks, experts = counts.shape[0], counts.shape[1] - 1
    arguments = {
        "counts_ptr": counts,
        "base_ptr": base,
        "local_offsets_ptr": local_offsets,
        "lost_ptr": lost,
        "capacity": capacity,
    }
    constants = {"P": ranks, "E": experts, "E_PAD": max(32, triton.next_power_of_2(experts))}
    return Launch(base_kernel, (1,), arguments, constants, _CONFIG)


def destination_launch(
    inverse: Tensor, offsets: Tensor, base: Tensor, destination: Tensor, ranks: int, capacity: int
) -> Launch:
    """The launch that writes `destination` [R] int32."""
    slots, experts = inverse.shape[0], offsets.shape[0]
    arguments = {
        "inverse_ptr": inverse,
        "offsets_ptr": offsets,
        "base_ptr": base,
        "destination_ptr": destination,
        "num_slots": slots,
        "capacity": capacity,
    }
    constants = {"P": ranks, "E": experts, "STEPS": (experts - 1).bit_length() + 1, "BLOCK": _BLOCK}
    return Launch(destination_kernel, (triton.cdiv(slots, _BLOCK),), arguments, constants, _CONFIG)


def plan(inverse: Tensor, offsets: Tensor, counts: Tensor, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    """inverse [R], offsets [E], counts [P, E + 1], all int32 → destination [R] int32, local offsets [L] int32, rows of
    this rank that fit nowhere [] int64."""
    ranks, experts = counts.shape[0], counts.shape[1] - 1
    destination = torch.empty_like(inverse)
    base = torch.empty_like(offsets)
    local_offsets = offsets.new_empty(experts // ranks)
    lost = torch.empty((), dtype=torch.int64, device=counts.device)
    base_launch(counts.contiguous(), base, local_offsets, lost, capacity).run()
    if inverse.numel():
        destination_launch(inverse.contiguous(), offsets.contiguous(), base, destination, ranks, capacity).run()
    return destination, local_offsets, lost
