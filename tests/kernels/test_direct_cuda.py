"""Rows written to other ranks on GPUs: several ranks as buffers on one GPU, and processes that write to each other.

The processes need two GPUs that reach each other's memory. On one GPU they run if torch lets two ranks share it
(TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1, set here): the driver then switches between the two processes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from moegraph import ops
from tests.ranks import RankPool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

GROUP = ops.EXPERT_GROUP
CASES: list[dict[str, Any]] = [
    {"tokens": 4096, "width": 4096, "k": 4, "experts": 32, "kind": "any", "dtype": torch.bfloat16},
    {"tokens": 1000, "width": 2048, "k": 8, "experts": 128, "kind": "dropped", "dtype": torch.bfloat16},
    {"tokens": 333, "width": 1000, "k": 1, "experts": 8, "kind": "silent", "dtype": torch.float16},
    {"tokens": 100, "width": 515, "k": 2, "experts": 48, "kind": "one", "dtype": torch.float32},
    {"tokens": 64, "width": 40, "k": 2, "experts": 8, "kind": "any", "dtype": torch.float64},
]


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['kind']}-k{case['k']}-d{case['width']}")
def test_ranks_that_share_a_gpu_are_bitwise_plain_indexing(case: dict[str, Any], ranks: int) -> None:
    from moegraph.runtime import symmetric
    from tests.kernels.fake_ranks import channels, check_trip, planned, round_trip, sizes

    device = torch.device("cuda")
    everything = ranks * case["tokens"] * case["k"]
    symmetric.poison(True)
    try:
        for room in (everything, case["tokens"] * case["k"] // 2 + 1):
            parts = planned(ranks, room, device, **case)
            out, home = (channels(ranks, size, device) for size in sizes(parts, room))
            for values in (True, False, True):
                check_trip(round_trip(out, home, parts, room, values), parts, room, values)
            assert all(int(channel.epoch) == 3 for channel in out + home)
    finally:
        symmetric.poison(False)


def test_a_round_trip_waits_for_nothing_on_the_host() -> None:
    from tests.kernels.fake_ranks import channels, planned, round_trip, sizes

    device, case = torch.device("cuda"), CASES[1]
    room = 2 * case["tokens"] * case["k"]
    parts = planned(2, room, device, **case)
    out, home = (channels(2, size, device) for size in sizes(parts, room))
    round_trip(out, home, parts, room)
    torch.cuda.set_sync_debug_mode("error")
    try:
        round_trip(out, home, parts, room)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def trips(rank: int, exchanges: int, poison: bool, graph: bool) -> list[str]:
    """As one of two processes: forward and backward of dispatch and return, `exchanges` times on new inputs, beside the
    declared equivalent on the CPU over gloo. What differs, by name; rank r runs on GPU r where there are two."""
    import torch.distributed as dist

    from moegraph._torch_compat import forget_process_group, name_process_group
    from moegraph.runtime import symmetric

    torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group("gloo" if torch.cuda.device_count() < 2 else "cpu:gloo,cuda:nccl")
    name_process_group(GROUP, dist.group.WORLD)
    symmetric.poison(poison)
    try:
        found = _graphed(rank) if graph else _compared(rank, exchanges)
        torch.cuda.synchronize()
        dist.barrier()
    finally:
        symmetric.poison(False)
        symmetric.forget_channels()
        forget_process_group(GROUP)
        dist.destroy_process_group()
    return found


def _trip(x: Tensor, weights: Tensor, ids: Tensor, counts: Tensor, tangent: Tensor, experts: int) -> tuple[Tensor, ...]:
    room = 3 * ids.numel() // 2
    _, inverse, offsets = ops.sort_by_expert(ids, experts)
    destination, local, lost = ops.direct_plan(inverse, offsets, counts, room)
    rows, weight, origin = ops.direct_dispatch(x, weights, destination, local, counts, room, GROUP)
    y = rows * weight.detach()[:, None].to(rows.dtype)  # nothing that is summed in another order elsewhere
    out = ops.direct_return(y, origin, destination, local, counts, ids.shape[1], GROUP)
    grads = torch.autograd.grad([out, weight], [x, weights], [tangent, 3 * weight.detach()])
    return rows.detach(), weight.detach(), local, lost, out.detach(), *grads


def _inputs(rank: int, number: int) -> tuple[Tensor, ...]:
    """x [T, D], weights and ids [T, K], and the counts of both ranks, on the CPU, skewed more and more."""
    tokens, width, k, experts = 512, 1024, 4, 16
    generator = torch.Generator().manual_seed(2 * number + rank)
    scores = torch.randn(tokens, experts, generator=generator)
    scores += number % 4 * torch.linspace(0, 1, experts)
    ids = scores.topk(k, -1).indices.int()
    x = torch.randn(tokens, width, generator=generator).bfloat16()
    tangent = torch.randn(tokens, width, generator=generator).bfloat16()
    told, one = ops.counts_for_ranks(ops.sort_by_expert(ids, experts)[2], 2), [1, 1]
    counts = ops.all_to_all_wait(ops.all_to_all_start(told, one, one, GROUP), one, one, GROUP)
    return x, torch.rand(tokens, k, generator=generator), ids, counts, tangent


def _run(rank: int, number: int, device: str) -> tuple[Tensor, ...]:
    x, weights, ids, counts, tangent = (value.to(device) for value in _inputs(rank, number))
    return _trip(x.requires_grad_(), weights.requires_grad_(), ids, counts, tangent, 16)


def _compared(rank: int, exchanges: int) -> list[str]:
    names = ("rows", "weights", "offsets", "lost", "out", "dx", "dweights")
    on_gpu = [_run(rank, number, "cuda") for number in range(exchanges)]
    wrong = []
    for number, got in enumerate(on_gpu):
        want = _run(rank, number, "cpu")
        pairs = zip(names, got, want, strict=True)
        wrong += [f"exchange {number}: {name}" for name, a, b in pairs if not torch.equal(a.cpu(), b)]
    return wrong


def _graphed(rank: int) -> list[str]:
    """Captured as a CUDA graph and replayed on other inputs: epochs live on the device."""
    fixed = [value.cuda() for value in _inputs(rank, 0)]
    leaves = [value.requires_grad_() for value in fixed[:2]]
    stream: Any = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            _trip(*leaves, *fixed[2:], 16)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        found = _trip(*leaves, *fixed[2:], 16)
    wrong = []
    for number in (1, 2, 3):
        with torch.no_grad():
            for value, new in zip(fixed, _inputs(rank, number), strict=True):
                value.copy_(new)
        captured.replay()
        want = _run(rank, number, "cpu")
        pairs = enumerate(zip(found, want, strict=True))
        wrong += [f"replay {number}: result {i}" for i, (a, b) in pairs if not torch.equal(a.cpu(), b)]
    return wrong


@pytest.fixture(scope="module")
def pair() -> Iterator[RankPool]:
    if torch.cuda.device_count() < 2:
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    pool = RankPool(2)
    yield pool
    pool.close()


def run_pair(pair: RankPool, *arguments: Any) -> list[list[str]]:
    from tests.ranks import RankFailed

    try:
        return pair.run(2, trips, *arguments)
    except RankFailed as error:
        if torch.cuda.device_count() < 2 and "layout.transport direct needs" in str(error):
            pytest.skip("two ranks cannot share this GPU: needs two")
        raise


@pytest.mark.parametrize("poison", [False, True])
def test_two_processes_are_bitwise_the_declared_equivalent(pair: RankPool, poison: bool) -> None:
    assert run_pair(pair, 8, poison, False) == [[], []]


def test_an_exchange_can_be_captured_and_replayed(pair: RankPool) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs: replays of two processes on one GPU may wait for each other")
    assert run_pair(pair, 0, False, True) == [[], []]


def test_cuda_without_symmetric_memory_is_refused_in_a_sentence() -> None:
    """A process without any group of that name."""
    x = torch.zeros(4, 8, device="cuda")
    index = torch.zeros(4, dtype=torch.int32, device="cuda")
    counts = torch.zeros(1, 3, dtype=torch.int32, device="cuda")
    from moegraph.errors import RunError

    with pytest.raises(RunError, match=r"use layout.transport=padded"):
        ops.direct_dispatch(x, x[:, :1].contiguous(), index, index[:2], counts, 4, "no such group")
