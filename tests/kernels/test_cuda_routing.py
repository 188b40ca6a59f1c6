"""Choosing and sorting on a GPU, through the operators, against torch's stable sorts at real sizes: the same integers,
twice, without a host synchronisation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moegraph import ops

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

SPECIAL = [float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1e-45, -1e-45, 1.0, -1.0]
CHOICES = [
    (1, 128, 8),
    (32768, 128, 8),
    (32768, 64, 4),
    (32768, 200, 8),
    (8192, 256, 8),
    (4096, 512, 10),
    (2048, 1024, 16),
    (4099, 8, 2),
    (4099, 3, 3),
    (4099, 1, 1),
    (300, 1024, 1024),
]


def scores_of(kind: str, tokens: int, experts: int) -> Tensor:
    torch.manual_seed(0)
    if kind == "normal":
        return torch.randn(tokens, experts, device="cuda")
    if kind == "ties":
        return torch.randint(-2, 3, (tokens, experts), device="cuda").float()
    index = torch.randint(0, len(SPECIAL), (tokens, experts), device="cuda")
    return torch.tensor(SPECIAL, device="cuda")[index]


@pytest.mark.parametrize("kind", ["normal", "ties", "special"])
@pytest.mark.parametrize(("tokens", "experts", "k"), CHOICES)
def test_the_k_largest_in_the_order_of_a_stable_sort(kind: str, tokens: int, experts: int, k: int) -> None:
    scores = scores_of(kind, tokens, experts)
    have = ops.choose_experts(scores, k)
    assert have.dtype == torch.int32
    assert torch.equal(have.long(), torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :k])
    assert torch.equal(have, ops.choose_experts(scores, k))


def test_more_than_two_billion_scores() -> None:
    scores = torch.randn(2_200_000, 1000, device="cuda")
    have = ops.choose_experts(scores, 2)
    for rows, ids in zip(scores.split(65536), have.split(65536), strict=True):
        assert torch.equal(ids.long(), torch.sort(rows, dim=-1, descending=True, stable=True).indices[:, :2])


def test_float64_scores_and_more_experts_than_the_kernel_takes_stay_with_torch() -> None:
    for scores in (torch.randn(100, 16, device="cuda").double(), torch.randn(100, 1500, device="cuda")):
        assert torch.equal(ops.choose_experts(scores, 3).cpu(), ops.choose_experts(scores.cpu(), 3))


def check_sort(ids: Tensor, experts: int) -> None:
    have = ops.sort_by_expert(ids, experts)
    for value, want in zip(have, ops.sort_by_expert(ids.cpu(), experts), strict=True):
        assert value.dtype == torch.int32
        assert torch.equal(value.cpu(), want)
    again = ops.sort_by_expert(ids, experts)
    assert all(torch.equal(a, b) for a, b in zip(have, again, strict=True))


@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("experts", [1, 3, 31, 32, 128, 200, 256, 1024])
@pytest.mark.parametrize(("tokens", "top_k"), [(1, 1), (1, 8), (511, 1), (256, 2), (171, 3), (32768, 8), (700_001, 3)])
def test_sorted_as_torch_sorts(tokens: int, top_k: int, experts: int, dropped: bool) -> None:
    torch.manual_seed(0)
    low, high = (-2, experts + 2) if dropped else (0, experts)
    check_sort(torch.randint(low, high, (tokens, top_k), dtype=torch.int32, device="cuda"), experts)


@pytest.mark.parametrize("value", [0, 64, 127, -1, 128, 2**31 - 1, -(2**31)])
def test_all_to_one_expert_or_to_none(value: int) -> None:
    check_sort(torch.full((5000, 8), value, dtype=torch.int32, device="cuda"), 128)


def test_no_tokens() -> None:
    check_sort(torch.empty(0, 8, dtype=torch.int32, device="cuda"), 128)
    assert ops.choose_experts(torch.empty(0, 128, device="cuda"), 8).shape == (0, 8)


def test_nothing_waits_for_the_device() -> None:
    scores = torch.randn(1000, 128, device="cuda")
    ops.sort_by_expert(ops.choose_experts(scores, 8), 128)
    torch.cuda.set_sync_debug_mode("error")
    try:
        ops.sort_by_expert(ops.choose_experts(scores, 8), 128)
    finally:
        torch.cuda.set_sync_debug_mode("default")
