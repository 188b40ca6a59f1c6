"""Several ranks in one process on one device: a channel each, whose buffers and flags are ordinary tensors.

They take their steps in turn: all write, all say so, all wait, all read. `round_trip` is a dispatch and a return.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from moegraph import ops
from moegraph.kernels import direct_plan
from moegraph.ops.direct_plan import plan_reference
from moegraph.ops.precision import accumulate_dtype
from moegraph.runtime.symmetric import Channel, Layout, Put, Take


def channels(ranks: int, size: int, device: torch.device) -> list[Channel]:
    """A channel for each rank, with buffers of `size` bytes of rubbish."""

    def addresses(tensors: list[Tensor]) -> Tensor:
        return torch.tensor([each.data_ptr() for each in tensors], dtype=torch.int64, device=device)

    size = -(-size // 16) * 16
    buffers = [torch.full((size,), 0xAB, dtype=torch.uint8, device=device) for _ in range(ranks)]
    flags = [torch.zeros(2, ranks, dtype=torch.int32, device=device) for _ in range(ranks)]
    tables = addresses(buffers), addresses(flags)
    return [
        Channel(rank, buffers[rank], tables[0], flags[rank], tables[1], torch.zeros_like(flags[rank][0, :1]))
        for rank in range(ranks)
    ]


def exchange(parts: list[Any]) -> list[Any]:
    """One exchange of all ranks."""
    for part in parts:
        part.channel.wait_until_free()
        part.write()
    for part in parts:
        part.channel.say_arrived()
    for part in parts:
        part.channel.wait_for_rows()
    found = [part.read() for part in parts]
    for part in parts:
        part.channel.release()
    return found


class Rank(NamedTuple):
    """One rank's tokens x [T, D], weights [T, K] and choices [T, K], and where its rows go."""

    x: Tensor
    weights: Tensor
    destination: Tensor
    offsets: Tensor
    counts: Tensor
    lost: Tensor


def random_ids(rank: int, tokens: int, k: int, experts: int, kind: str) -> Tensor:
    """Choices [T, K]: `any`; `one`: all of the last expert; `dropped`: some of none; `silent`: rank 1 has none."""
    generator = torch.Generator().manual_seed(rank + 31 * tokens)
    ids = torch.rand(tokens, experts, generator=generator).topk(k, -1).indices.int()
    if kind == "one":
        return torch.full_like(ids, experts - 1)
    if kind == "dropped":
        ids[::2, 0] = -1
    if kind == "silent" and rank == 1:
        return torch.full_like(ids, experts)
    return ids


def planned(
    ranks: int, room: int, device: torch.device, *, tokens: int, width: int, k: int, experts: int, kind: str, dtype: Any
) -> list[Rank]:
    """Every rank's part of a batch, planned by the kernel, which has to agree with plain torch."""
    ids = [random_ids(rank, tokens, k, experts, kind).to(device) for rank in range(ranks)]
    sorts = [ops.sort_by_expert(each, experts) for each in ids]
    told = [ops.counts_for_ranks(offsets, ranks) for _, _, offsets in sorts]
    found = []
    for rank, (_, inverse, offsets) in enumerate(sorts):
        generator = torch.Generator().manual_seed(rank)
        x = torch.randn(tokens, width, generator=generator).to(dtype).to(device)
        weights = torch.rand(tokens, k, generator=generator).to(device)
        counts = torch.stack([each[rank] for each in told])
        have = direct_plan.plan(inverse, offsets, counts, room)
        for value, want in zip(have, plan_reference(inverse, offsets, counts, room), strict=True):
            assert value.dtype == want.dtype
            assert torch.equal(value, want)
        found.append(Rank(x, weights, *have[:2], counts, have[2]))
    return found


class Trip(NamedTuple):
    """What every rank has after a dispatch, (rows, weights, origins), and after a return of rows, (sums, values)."""

    arrived: list[tuple[Tensor, Tensor, Tensor]]
    returned: list[tuple[Tensor, Tensor]]


def round_trip(out: list[Channel], home: list[Channel], parts: list[Rank], room: int, values: bool = True) -> Trip:
    """A dispatch, and a return of the rows that arrived, as the operators do them on CUDA."""
    x, weights = parts[0].x, parts[0].weights
    there = Layout(room, x.shape[1], x.dtype, weights.dtype)
    back = Layout(weights.numel(), x.shape[1], x.dtype, weights.dtype)
    arrived = exchange(
        [
            Put(channel, there, p.x, p.weights.reshape(-1) if values else None, p.destination, p.offsets, p.counts)
            for channel, p in zip(out, parts, strict=True)
        ]
    )
    origins = expected_arrivals(parts, room)[2] if not values else [each[2] for each in arrived]
    returned = exchange(
        [
            Take(channel, back, rows, weight if values else None, origin, p.destination, p.offsets, weights.shape[1])
            for channel, p, (rows, weight, _), origin in zip(home, parts, arrived, origins, strict=True)
        ]
    )
    return Trip(arrived, returned)


def sizes(parts: list[Rank], room: int) -> tuple[int, int]:
    """Bytes of the buffers out and home."""
    x, weights = parts[0].x, parts[0].weights
    shape = (x.shape[1], x.dtype, weights.dtype)
    return Layout(room, *shape).bytes, Layout(weights.numel(), *shape).bytes


def expected_arrivals(parts: list[Rank], room: int) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """What each rank is to get, by plain indexing: rows, weights and origins."""
    ranks, slots, k = len(parts), parts[0].destination.shape[0], parts[0].weights.shape[1]
    x = parts[0].x
    rows = x.new_zeros(ranks * room + 1, x.shape[1])
    weights = parts[0].weights.new_zeros(ranks * room + 1)
    origins = torch.zeros(ranks * room + 1, dtype=torch.int32, device=x.device)
    for rank, p in enumerate(parts):
        to = torch.where(p.destination >= 0, p.destination, ranks * room).long()
        rows[to] = p.x.repeat_interleave(k, 0)
        weights[to] = p.weights.reshape(-1)
        origins[to] = torch.arange(rank * slots, (rank + 1) * slots, dtype=torch.int32, device=x.device)
    return tuple([*each[:-1].split(room)] for each in (rows, weights, origins))  # type: ignore[return-value]


def expected_sums(parts: list[Rank]) -> list[tuple[Tensor, Tensor]]:
    """What each rank is to get back where every row comes back as it went."""
    found = []
    for p in parts:
        exists = (p.destination >= 0).reshape(p.weights.shape)
        total = torch.zeros(p.x.shape, dtype=accumulate_dtype(p.x.dtype), device=p.x.device)
        for j in range(exists.shape[1]):
            total += torch.where(exists[:, j, None], p.x, 0)
        found.append((total.to(p.x.dtype), torch.where(exists, p.weights, 0)))
    return found


def check_trip(trip: Trip, parts: list[Rank], room: int, values: bool = True) -> None:
    """Bitwise what is expected."""
    rows, weights, origins = expected_arrivals(parts, room)
    for rank, ((got, weight, origin), (total, value)) in enumerate(zip(trip.arrived, trip.returned, strict=True)):
        assert torch.equal(got, rows[rank])
        want = expected_sums(parts)[rank]
        assert torch.equal(total, want[0])
        if values:
            assert torch.equal(weight, weights[rank])
            assert torch.equal(origin, origins[rank])
            assert torch.equal(value, want[1])
