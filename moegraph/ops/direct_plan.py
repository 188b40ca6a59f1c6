"""Where each row goes when rows are written straight into the memory of the ranks that own their experts.

Ranks tell each other how many rows they have for each expert (`counts_for_ranks` and one small collective); from that
everybody knows where in which buffer each of its rows belongs, before any row travels.

Legend: T tokens, E experts of the model, K top-k, R = T·K slots of this rank, P ranks of the expert group, L = E/P
experts of a rank, N rows of a rank's buffer.
"""

from __future__ import annotations

import torch
from torch import Tensor


def counts_for_ranks(offsets: Tensor, ranks: int) -> Tensor:
    """What this rank tells each rank: [P, E + 1] int32 from offsets [E].

    Row p goes to rank p: how many rows this rank has for each expert, the same in every row, and last the number p. So
    what a rank receives, row s from rank s, are the counts of all ranks and, in the last column, its own number: no
    rank number is written into a graph.
    """
    before = torch.cat([torch.zeros_like(offsets[:1]), offsets[:-1]])
    numbers = torch.arange(ranks, dtype=offsets.dtype, device=offsets.device)
    return torch.cat([(offsets - before).expand(ranks, -1), numbers[:, None]], dim=1)


@torch.library.custom_op("moegraph::direct_plan", mutates_args=())
def _direct_plan(inverse: Tensor, offsets: Tensor, counts: Tensor, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    if counts.shape[0] * max(capacity, inverse.shape[0]) >= 2**31:
        raise ValueError(f"{counts.shape[0]} ranks with {capacity} rows each are more than int32 numbers")
    if inverse.device.type == "cuda":
        from moegraph.kernels import direct_plan

        return direct_plan.plan(inverse, offsets, counts, capacity)
    return plan_reference(inverse, offsets, counts, capacity)


def plan_reference(inverse: Tensor, offsets: Tensor, counts: Tensor, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    """`direct_plan` in plain torch, on any device; without waiting for it."""
    ranks, experts = counts.shape[0], offsets.shape[0]
    counts, rank = counts[:, :experts].to(torch.int64), counts[0, experts]
    earlier = (torch.arange(ranks, device=counts.device) < rank)[:, None]
    ends = counts.sum(0).reshape(ranks, -1).cumsum(1)
    starts = torch.cat([torch.zeros_like(ends[:, :1]), ends[:, :-1]], dim=1)
    base = starts.reshape(-1) + torch.where(earlier, counts, 0).sum(0)
    expert = torch.searchsorted(offsets, inverse, right=True).clamp(max=experts - 1)
    before = torch.cat([torch.zeros_like(offsets[:1]), offsets[:-1]])
    place = base.index_select(0, expert) + inverse - before.index_select(0, expert)
    owner = torch.div(expert, experts // ranks, rounding_mode="floor")
    exists = inverse < offsets[-1]
    fits = exists & (place < capacity)
    destination = torch.where(fits, owner * capacity + place, -1).to(torch.int32)
    local_offsets = ends.index_select(0, rank.reshape(1).to(torch.int64)).reshape(-1).clamp(max=capacity)
    return destination, local_offsets.to(torch.int32), (exists & ~fits).to(torch.int64).sum()


@_direct_plan.register_fake
def _(inverse: Tensor, offsets: Tensor, counts: Tensor, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    local = offsets.new_empty(offsets.shape[0] // counts.shape[0])
    return torch.empty_like(inverse), local, inverse.new_empty((), dtype=torch.int64)


def direct_plan(inverse: Tensor, offsets: Tensor, counts: Tensor, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    """inverse [R], offsets [E] of this rank's rows, and the counts [P, E + 1] of all ranks, all int32 →

    - destination [R] int32: slot s goes to row destination[s] % N of rank destination[s] // N, or nowhere if -1: it has
      no row, or its owner's buffer is full. Buffers are sorted by (expert, source rank, slot).
    - local offsets [L] int32: the ends of this rank's experts' rows in its own buffer, at most N.
    - lost, 0-d int64: how many rows of this rank find no place. A buffer is full at N = `capacity` rows, whoever sent
      them; the rows that come last in its order are the ones left out.
    """
    result: tuple[Tensor, Tensor, Tensor] = _direct_plan(inverse, offsets, counts, capacity)
    return result


def row_numbers(rows: Tensor) -> Tensor:
    """0 … N-1 int32 for rows [N, …]: the order of rows that are where they belong already."""
    return torch.arange(rows.shape[0], dtype=torch.int32, device=rows.device)
