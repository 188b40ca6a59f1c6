"""Rows on their way to the ranks of their experts: buckets of equal capacity, one per rank of the expert group.

Rows sorted by expert are sorted by rank too, because rank p of the group owns experts p·(E/P) … (p+1)·(E/P) - 1. Bucket
p holds the first C of the rows that go to rank p; what is beyond C does not travel (`overflow` counts it, and a run
either computes the step again with more capacity, has dropped these choices beforehand by a rule, or stops).

Legend: R routed rows of this rank, D width, E experts of the model, P ranks of the expert group, C rows of a bucket,
N = P·C rows that can arrive here. Counts and offsets are int32 on the device; nothing here waits for the device.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def bucket_capacity(rows: int, ranks: int, capacity: float) -> int:
    """C: `capacity` times the balanced load of a bucket, at least 1 and at most all rows of the sending rank."""
    return max(1, min(rows, math.ceil(capacity * rows / ranks)))


def rank_ends(offsets: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
    """(start [P], end [P]) of each rank's rows among rows sorted by expert, from offsets [E] (inclusive ends)."""
    ends = offsets.reshape(ranks, -1)[:, -1]
    starts = torch.cat([torch.zeros_like(ends[:1]), ends[:-1]])
    return starts, ends


def expert_counts_to_send(offsets: Tensor, ranks: int, capacity: int) -> Tensor:
    """How many rows of each of its experts this rank sends to each rank: [P, E/P] int32, after cutting at capacity."""
    starts, _ = rank_ends(offsets, ranks)
    inside = (offsets.reshape(ranks, -1) - starts[:, None]).clamp(max=capacity)
    before = torch.cat([torch.zeros_like(inside[:, :1]), inside[:, :-1]], dim=1)
    return inside - before


def overflow(offsets: Tensor, ranks: int, capacity: int) -> Tensor:
    """How many rows do not fit into their bucket: 0-d int64."""
    starts, ends = rank_ends(offsets, ranks)
    return (ends - starts - capacity).clamp(min=0).to(torch.int64).sum()


def rows_per_rank(counts: Tensor) -> Tensor:
    """Counts [P, E/P] → [P] int32: rows to or from each rank."""
    return counts.sum(dim=1, dtype=torch.int32)


def received_experts(counts: Tensor, capacity: int) -> Tensor:
    """Which local expert each place of the received buckets belongs to: [N, 1] int32, from counts [P, E/P].

    Within a bucket rows are sorted by expert. A place that holds no row gets E/P, an expert that does not exist.
    """
    ends = counts.cumsum(dim=1, dtype=torch.int32)
    places = torch.arange(capacity, dtype=torch.int32, device=counts.device)
    return (places[None, :, None] >= ends[:, None, :]).sum(dim=2, dtype=torch.int32).reshape(-1, 1)


@torch.library.custom_op("moegraph::pack_rows", mutates_args=())
def _pack_rows(rows: Tensor, offsets: Tensor, ranks: int, capacity: int) -> Tensor:
    starts, ends = rank_ends(offsets, ranks)
    places = torch.arange(capacity, dtype=torch.int32, device=rows.device)
    source = starts[:, None] + places
    exists = source < ends[:, None]
    source = torch.where(exists, source, 0).reshape(-1)
    words = _as_words(rows)
    packed = words.index_select(0, source)
    packed.masked_fill_(~exists.reshape(-1, *[1] * (rows.dim() - 1)), 0)
    return packed.view(rows.dtype)


def _as_words(rows: Tensor) -> Tensor:
    """Payloads of bytes, which torch would copy byte by byte, as a view of words where they are whole words."""
    if rows.dtype == torch.uint8 and rows.shape[-1] % 8 == 0 and rows.is_contiguous():
        return rows.view(torch.int64)
    return rows


@_pack_rows.register_fake
def _(rows: Tensor, offsets: Tensor, ranks: int, capacity: int) -> Tensor:
    return rows.new_empty(ranks * capacity, *rows.shape[1:])


@torch.library.custom_op("moegraph::unpack_rows", mutates_args=())
def _unpack_rows(packed: Tensor, offsets: Tensor, ranks: int, count: int) -> Tensor:
    capacity = packed.shape[0] // ranks
    starts, ends = rank_ends(offsets, ranks)
    row = torch.arange(count, dtype=torch.int32, device=packed.device)
    rank = torch.searchsorted(ends.contiguous(), row, right=True, out_int32=True)
    known = rank < ranks
    rank = torch.where(known, rank, 0)
    place = row - starts.index_select(0, rank)
    exists = known & (place < capacity)
    source = torch.where(exists, rank * capacity + place, 0)
    rows = packed.index_select(0, source)
    return rows.masked_fill_(~exists.reshape(-1, *[1] * (packed.dim() - 1)), 0)


@_unpack_rows.register_fake
def _(packed: Tensor, offsets: Tensor, ranks: int, count: int) -> Tensor:
    return packed.new_empty(count, *packed.shape[1:])


def _pack_setup(ctx: Any, inputs: tuple[Tensor, Tensor, int, int], output: Tensor) -> None:
    rows, offsets, ctx.ranks, _ = inputs
    ctx.count = rows.shape[0]
    ctx.save_for_backward(offsets)


def _pack_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    return _unpack_rows(grad, ctx.saved_tensors[0], ctx.ranks, ctx.count), None, None, None


def _unpack_setup(ctx: Any, inputs: tuple[Tensor, Tensor, int, int], output: Tensor) -> None:
    packed, offsets, ctx.ranks, _ = inputs
    ctx.capacity = packed.shape[0] // ctx.ranks
    ctx.save_for_backward(offsets)


def _unpack_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    return _pack_rows(grad, ctx.saved_tensors[0], ctx.ranks, ctx.capacity), None, None, None


_pack_rows.register_autograd(_pack_backward, setup_context=_pack_setup)
_unpack_rows.register_autograd(_unpack_backward, setup_context=_unpack_setup)


def pack_rows(rows: Tensor, offsets: Tensor, *, ranks: int, capacity: int) -> Tensor:
    """Rows [R, …] sorted by expert → buckets [P·C, …]; places without a row are zeros, rows beyond C are left out.

    Its gradient is `unpack_rows`.
    """
    packed: Tensor = _pack_rows(rows, offsets, ranks, capacity)
    return packed


def unpack_rows(packed: Tensor, offsets: Tensor, *, ranks: int, count: int) -> Tensor:
    """Buckets [P·C, …] → rows [count, …] sorted by expert, as they were before `pack_rows`; a row that did not fit
    into its bucket, or that does not exist, is zeros. Its gradient is `pack_rows`."""
    rows: Tensor = _unpack_rows(packed, offsets, ranks, count)
    return rows


def as_column(x: Tensor) -> Tensor:
    """x [R] → [R, 1]."""
    return x.reshape(-1, 1)


def drop_overflow(ids: Tensor, weights: Tensor, *, num_experts: int, ranks: int, capacity: int) -> Tensor:
    """Takes choices out until every rank's rows fit into its bucket: ids [T, K] int32 → [T, K] int32, where a choice
    that was taken out is `num_experts`.

    The rule: of the choices that go to one rank, the C with the largest router weights (weights [T, K]) stay; among
    equal weights the ones that come first. It looks at weights, not at positions in the sequence.
    """
    flat = ids.reshape(-1)
    rank = torch.div(flat, num_experts // ranks, rounding_mode="floor")
    by_weight = torch.sort(weights.detach().reshape(-1), descending=True, stable=True).indices
    by_rank = torch.sort(rank.index_select(0, by_weight), stable=True)
    order = by_weight.index_select(0, by_rank.indices)
    edges = torch.arange(ranks, dtype=by_rank.values.dtype, device=ids.device)
    starts = torch.searchsorted(by_rank.values, edges)
    place = torch.arange(flat.shape[0], device=ids.device) - starts.index_select(0, by_rank.values.to(torch.int64))
    kept = torch.where(place < capacity, flat.index_select(0, order), num_experts)
    return torch.empty_like(flat).scatter(0, order, kept).reshape(ids.shape)


def count_dropped(ids: Tensor, kept: Tensor) -> Tensor:
    """How many choices differ between ids and kept [T, K]: 0-d int64."""
    return (ids != kept).to(torch.int64).sum()
