"""Rows written straight to their places: the plan against a loop, and dispatch and return against transport `padded`,
bitwise, through simulated ranks; gradients against a model that is not distributed."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from moegraph import ops
from moegraph.ops.direct import direct_take
from moegraph.ops.direct_plan import plan_reference
from moegraph.verify.world import World

GROUP = ops.EXPERT_GROUP


class Batch(NamedTuple):
    """One rank's tokens [T, D], router weights and choices [T, K]."""

    x: Tensor
    weights: Tensor
    ids: Tensor


def batch(rank: int, tokens: int, k: int, experts: int, kind: str = "any", dtype: torch.dtype = torch.float32) -> Batch:
    generator = torch.Generator().manual_seed(7 * rank + tokens)
    x = torch.randn(tokens, 5, generator=generator, dtype=torch.float64).to(dtype)
    weights = torch.rand(tokens, k, generator=generator, dtype=torch.float64)
    ids = torch.rand(tokens, experts, generator=generator).topk(k, -1).indices.int()
    if kind == "one":
        ids = torch.full_like(ids, experts - 1)  # a single expert gets everything, all others nothing
    if kind == "dropped":
        ids[::2, 0] = experts  # slots without a row
    if kind == "silent" and rank == 1:
        ids = torch.full_like(ids, -1)  # this rank sends nothing
    return Batch(x, weights.to(torch.float64 if dtype == torch.float64 else torch.float32), ids)


def direct(b: Batch, experts: int, ranks: int, room: int) -> tuple[Tensor, ...]:
    """(rows, their weights, local offsets, lost, sums, origin) of a round trip in which expert rows are doubled."""
    _, inverse, offsets = ops.sort_by_expert(b.ids, experts)
    told, one = ops.counts_for_ranks(offsets, ranks), [1] * ranks
    counts = ops.all_to_all_wait(ops.all_to_all_start(told, one, one, GROUP), one, one, GROUP)
    destination, local, lost = ops.direct_plan(inverse, offsets, counts, room)
    rows, weight, origin = ops.direct_dispatch(b.x, b.weights, destination, local, counts, room, GROUP)
    y = rows * weight[:, None].to(rows.dtype)
    out = ops.direct_return(y, origin, destination, local, counts, b.ids.shape[1], GROUP)
    return rows, weight, local, lost, out, origin


def padded(b: Batch, experts: int, ranks: int, bucket: int) -> tuple[Tensor, ...]:
    """The same by buckets of equal capacity and a local sort."""
    k = b.ids.shape[1]
    order, inverse, offsets = ops.sort_by_expert(b.ids, experts)
    size, one = [bucket] * ranks, [1] * ranks

    def exchange(x: Tensor, sizes: list[int]) -> Tensor:
        return ops.all_to_all_wait(ops.all_to_all_start(x, sizes, sizes, GROUP), sizes, sizes, GROUP)

    def pack(x: Tensor) -> Tensor:
        return exchange(ops.pack_rows(x, offsets, ranks=ranks, capacity=bucket), size)

    arrived = exchange(ops.expert_counts_to_send(offsets, ranks, bucket), one)
    there = pack(ops.permute(b.x, order, inverse, offsets, top_k=k))
    column = pack(ops.as_column(ops.gather_weights(b.weights, order, inverse, offsets)))
    local = ops.sort_by_expert(ops.received_experts(arrived, bucket), experts // ranks)
    rows = ops.permute(there, *local, top_k=1)
    weight = ops.gather_weights(column, *local)
    y = ops.combine(rows * weight[:, None].to(rows.dtype), *local, top_k=1)
    back = ops.unpack_rows(exchange(y, size), offsets, ranks=ranks, count=order.shape[0])
    lost = ops.overflow(offsets, ranks, bucket)
    return rows, weight, local[2], lost, ops.combine(back, order, inverse, offsets, top_k=k)


def run(function: Any, ranks: int, *options: Any, grad: bool = True, **kinds: Any) -> list[tuple[Tensor, ...]]:
    """Results of each rank, and after them the gradients of its tokens and weights."""

    def work(rank: Any) -> tuple[Tensor, ...]:
        b = batch(rank.index, **kinds)
        b = b._replace(x=b.x.requires_grad_(grad), weights=b.weights.requires_grad_(grad))
        found = function(b, kinds["experts"], ranks, *options)
        generator = torch.Generator().manual_seed(rank.index)
        tangent = torch.randn(found[4].shape, generator=generator, dtype=torch.float64).to(found[4].dtype)
        grads = torch.autograd.grad(found[4], [b.x, b.weights], tangent) if grad else ()
        return (*(value.detach() for value in found[:5]), *grads)

    return World(ranks).run(work)


CASES = [
    {"tokens": 9, "k": 2, "experts": 6, "kind": "any"},
    {"tokens": 9, "k": 4, "experts": 6, "kind": "dropped"},
    {"tokens": 7, "k": 1, "experts": 6, "kind": "one"},
    {"tokens": 8, "k": 2, "experts": 6, "kind": "silent"},
    {"tokens": 8, "k": 4, "experts": 12, "kind": "any", "dtype": torch.bfloat16},
]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['kind']}-k{case['k']}")
def test_direct_is_bitwise_padded(case: dict[str, Any], ranks: int) -> None:
    bucket = case["tokens"] * case["k"]
    expected = run(padded, ranks, bucket, **case)
    found = run(direct, ranks, ranks * bucket, **case)
    names = ("rows", "weight", "offsets", "lost", "out", "dx", "dweights")
    for rank, (a, b) in enumerate(zip(found, expected, strict=True)):
        for name, value, want in zip(names, a, b, strict=True):
            assert value.dtype == want.dtype
            assert torch.equal(value, want), (rank, name)


def test_the_plan_is_what_a_loop_over_ranks_and_slots_says() -> None:
    ranks, experts, room = 3, 6, 7
    batches = [batch(rank, 5, 2, experts, "dropped") for rank in range(ranks)]
    sorts = [ops.sort_by_expert(b.ids, experts) for b in batches]
    told = [ops.counts_for_ranks(offsets, ranks) for _, _, offsets in sorts]
    filled = [0] * ranks
    expected = [torch.full((10,), -1, dtype=torch.int32) for _ in range(ranks)]
    lost, ends = [0] * ranks, torch.zeros(ranks, experts // ranks, dtype=torch.int32)
    for expert in range(experts):
        owner = expert // 2
        for rank, b in enumerate(batches):
            for slot in (b.ids.reshape(-1) == expert).nonzero().reshape(-1).tolist():
                if filled[owner] < room:
                    expected[rank][slot] = owner * room + filled[owner]
                    filled[owner] += 1
                else:
                    lost[rank] += 1
        ends[owner, expert % 2] = filled[owner]
    assert sum(lost) > 0
    for rank, (_, inverse, offsets) in enumerate(sorts):
        counts = torch.stack([each[rank] for each in told])
        destination, local, missing = plan_reference(inverse, offsets, counts, room)
        assert torch.equal(destination, expected[rank])
        assert torch.equal(local, ends[rank])
        assert int(missing) == lost[rank]


def test_rows_past_a_full_buffer_are_counted_and_left_out() -> None:
    case = {"tokens": 8, "k": 2, "experts": 4, "kind": "one"}
    found = run(direct, 2, 20, **case)  # 32 rows for one buffer of 20
    assert [int(each[3]) for each in found] == [0, 12]  # those of the later rank
    assert [each[2].tolist() for each in found] == [[0, 0], [0, 20]]
    whole = run(direct, 2, 32, **case)
    assert torch.equal(found[0][4], whole[0][4])
    assert torch.equal(found[1][4][:2], whole[1][4][:2])
    assert not found[1][4][2:].any()
    assert not found[1][5][2:].any()  # and no gradient comes from what was left out
    assert not found[1][6][2:].any()


def test_rows_that_do_not_exist_are_zeros_and_not_read() -> None:
    def work(rank: Any) -> Tensor:
        b = batch(rank.index, 4, 2, 4)
        _, inverse, offsets = ops.sort_by_expert(b.ids, 4)
        told, one = ops.counts_for_ranks(offsets, 2), [1, 1]
        counts = ops.all_to_all_wait(ops.all_to_all_start(told, one, one, GROUP), one, one, GROUP)
        destination, local, _ = ops.direct_plan(inverse, offsets, counts, 16)
        rows, weight, origin = ops.direct_dispatch(b.x, b.weights, destination, local, counts, 16, GROUP)
        end = int(local[-1])
        assert not rows[end:].any()
        assert not weight[end:].any()
        assert origin.dtype == torch.int32
        rows[end:], weight[end:] = float("nan"), float("nan")
        out = ops.direct_return(rows, origin, destination, local, counts, 2, GROUP)
        both = direct_take(rows, weight, origin, destination, local, counts, 2, GROUP)
        assert torch.equal(both[0], out)
        assert torch.equal(both[1], b.weights)
        return out - 2 * b.x

    for difference in World(2).run(work):
        assert not difference.any()


def test_gradients_are_those_of_finite_differences() -> None:
    def work(rank: Any) -> bool:
        b = batch(0, 4, 2, 3, "dropped", torch.float64)

        def trip(x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            found = direct(Batch(x, weights, b.ids), 3, 1, 6)  # a buffer that some rows do not fit into
            return found[0], found[1], found[4]

        return torch.autograd.gradcheck(trip, (b.x.requires_grad_(), b.weights.requires_grad_()))

    assert World(1).run(work) == [True]


def test_more_rows_than_an_int32_numbers_are_refused() -> None:
    counts = torch.zeros(2, 5, dtype=torch.int32)
    with pytest.raises(ValueError, match="more than int32"):
        ops.direct_plan(torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int32), counts, 2**30)
