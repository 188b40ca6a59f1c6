"""Choosing and sorting on the device against torch's stable sorts: the same integers, ties and NaN and all."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moegraph import ops
from moegraph.kernels import sort_rows, top_k
from moegraph.kernels.config import Config

NAN, INF = float("nan"), float("inf")
SPECIAL = torch.tensor([NAN, -NAN, INF, -INF, 0.0, -0.0, 1e-45, -1e-45, 1.0, -1.0, 3.4e38, -3.4e38])


def sorted_ids(scores: Tensor, k: int) -> Tensor:
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :k].int()


def scores_of(kind: str, tokens: int, experts: int) -> Tensor:
    generator = torch.Generator().manual_seed(experts)
    if kind == "normal":
        return torch.randn(tokens, experts, generator=generator)
    if kind == "ties":
        return torch.randint(-1, 2, (tokens, experts), generator=generator).float()
    return SPECIAL[torch.randint(0, len(SPECIAL), (tokens, experts), generator=generator)]


@pytest.mark.parametrize("kind", ["normal", "ties", "special"])
@pytest.mark.parametrize(
    ("tokens", "experts", "k"),
    [(5, 1, 1), (9, 3, 1), (9, 3, 3), (1, 128, 8), (33, 128, 8), (5, 200, 200), (6, 257, 2), (3, 1024, 16)],
)
def test_the_k_largest_in_the_order_of_a_stable_sort(kind: str, tokens: int, experts: int, k: int) -> None:
    scores = scores_of(kind, tokens, experts)
    assert torch.equal(top_k.top_k(scores, k), sorted_ids(scores, k))


def test_every_special_value_against_every_other() -> None:
    pairs = torch.cartesian_prod(SPECIAL, SPECIAL)
    assert torch.equal(top_k.top_k(pairs, 2), sorted_ids(pairs, 2))
    assert top_k.top_k(torch.tensor([[-0.0, 0.0]]), 2).tolist() == [[0, 1]]
    assert top_k.top_k(torch.full((1, 5), -INF), 5).tolist() == [[0, 1, 2, 3, 4]]
    assert top_k.top_k(torch.tensor([[1.0, NAN, INF, -NAN]]), 4).tolist() == [[1, 3, 2, 0]]


def test_scores_with_strides_and_no_tokens() -> None:
    scores = torch.randn(7, 12).t()
    assert torch.equal(top_k.top_k(scores, 3), sorted_ids(scores, 3))
    assert top_k.top_k(torch.empty(0, 4), 2).shape == (0, 2)


@pytest.mark.parametrize(
    ("scores", "k"),
    [(torch.zeros(2, 4), 0), (torch.zeros(2, 4), 5), (torch.zeros(2, 4).double(), 1), (torch.zeros(1, 1025), 1)],
)
def test_scores_it_does_not_take(scores: Tensor, k: int) -> None:
    with pytest.raises(ValueError, match="at most 1024 float32 scores"):
        top_k.top_k(scores, k)


def check_sort(ids: Tensor, experts: int, config: Config | None = None) -> None:
    have = sort_rows.sort_by_expert(ids, experts, config=config)
    for value, want in zip(have, ops.sort_by_expert(ids, experts), strict=True):
        assert value.dtype == torch.int32
        assert torch.equal(value, want)


@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "block"),
    [(1, 1, 1, 16), (1, 8, 128, 16), (37, 3, 3, 32), (64, 2, 31, 64), (50, 4, 128, 64), (11, 6, 200, 32)],
)
def test_sorted_as_torch_sorts(tokens: int, top_k: int, experts: int, block: int, dropped: bool) -> None:
    torch.manual_seed(tokens)
    low, high = (-2, experts + 2) if dropped else (0, experts)
    check_sort(torch.randint(low, high, (tokens, top_k), dtype=torch.int32), experts, Config(block_m=block))


@pytest.mark.parametrize("value", [0, 2, 4, -1, 5, 2**31 - 1, -(2**31)])
def test_all_to_one_expert_or_to_none(value: int) -> None:
    check_sort(torch.full((51, 1), value, dtype=torch.int32), 5, Config(block_m=16))


@pytest.mark.slow
def test_blocks_of_the_default_size_and_the_most_experts() -> None:
    torch.manual_seed(0)
    assert sort_rows.default_block(200).block_m == 512
    check_sort(torch.randint(-1, 201, (1, 600), dtype=torch.int32), 200)
    check_sort(torch.randint(0, 1024, (10, 13), dtype=torch.int32), 1024, Config(block_m=64))


@pytest.mark.parametrize("blocks", [1, 1023, 1024, 1025, 2500])
def test_running_sums_over_more_blocks_than_are_scanned_at_once(blocks: int) -> None:
    counts = torch.randint(0, 1000, (3, blocks), dtype=torch.int32)
    ends = counts.clone()
    sort_rows.scan_launch(ends).run()
    assert torch.equal(ends, counts.cumsum(1).int())


def test_two_runs_are_equal() -> None:
    ids, scores = torch.randint(-1, 6, (40, 2), dtype=torch.int32), scores_of("special", 40, 6)
    first, second = (sort_rows.sort_by_expert(ids, 5, config=Config(block_m=32)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert len({value.untyped_storage().data_ptr() for value in first}) == 3  # an operator's results share no memory
    assert torch.equal(top_k.top_k(scores, 3), top_k.top_k(scores, 3))


def test_ids_with_strides_and_no_tokens() -> None:
    torch.manual_seed(0)
    check_sort(torch.randint(0, 5, (3, 40), dtype=torch.int32).t(), 5, Config(block_m=32))
    check_sort(torch.empty(0, 2, dtype=torch.int32), 3)


def test_ids_it_does_not_take() -> None:
    for ids, experts in ((torch.zeros(2, 1, dtype=torch.int64), 4), (torch.zeros(2, 1, dtype=torch.int32), 1025)):
        with pytest.raises(ValueError, match="at most 1024 experts"):
            sort_rows.sort_by_expert(ids, experts)
