"""What is reported of the routing, and the loss-free bias."""

from __future__ import annotations

import pytest
import torch

from moegraph.runtime.router_metrics import layer_routing, updated_bias


def test_perfect_balance_has_no_violation_and_a_balance_of_one() -> None:
    routing = layer_routing([8, 8, 8, 8], [4.0, 4.0, 4.0, 4.0], 1.0)
    assert (routing.load_max, routing.load_min, routing.max_violation, routing.dead_experts) == (1.0, 1.0, 0.0, 0)
    assert (routing.balance, routing.alignment, routing.f_spread, routing.p_spread) == (1.0, 0.0, 0.0, 0.0)
    assert routing.dropped_tokens == 0


def test_loads_are_relative_to_the_mean() -> None:
    routing = layer_routing([12, 4, 0, 0], [4.0, 2.0, 1.0, 1.0], 0.5)
    assert routing.load_max == 3.0
    assert routing.load_min == 0.0
    assert routing.max_violation == 2.0
    assert routing.dead_experts == 2
    assert routing.entropy == 0.5


def test_the_balance_equals_its_definition_and_its_parts() -> None:
    counts, mass = [12, 4, 6, 2], [5.0, 1.5, 2.5, 3.0]
    routing = layer_routing(counts, mass, 0.9)
    f, p = [c / 24 for c in counts], [m / 12 for m in mass]
    assert routing.balance == pytest.approx(4 * sum(a * b for a, b in zip(f, p, strict=True)), rel=1e-14)
    assert routing.alignment == pytest.approx(4 * sum((a - 0.25) * (b - 0.25) for a, b in zip(f, p, strict=True)))
    assert routing.f_spread == pytest.approx(4 * sum((a - 0.25) ** 2 for a in f))
    assert routing.p_spread == pytest.approx(4 * sum((b - 0.25) ** 2 for b in p))


def test_the_spread_shows_what_the_balance_loss_hides() -> None:
    """Loads get worse while f and P stop agreeing: the loss falls below that of the better routing."""
    fair = layer_routing([7, 6, 6, 5], [7.0, 6.0, 6.0, 5.0], 0.99)
    worse = layer_routing([18, 2, 2, 2], [5.9, 6.0, 6.0, 6.1], 0.99)
    assert worse.balance < fair.balance
    assert worse.load_max > fair.load_max
    assert worse.f_spread > fair.f_spread


def test_sums_over_micro_batches_give_the_value_of_the_whole() -> None:
    parts = [([3, 1, 0, 4], [2.0, 1.0, 0.5, 0.5]), ([1, 5, 2, 0], [1.0, 1.5, 1.0, 0.5])]
    counts = [sum(c) for c in zip(*(c for c, _ in parts), strict=True)]
    mass = [sum(m) for m in zip(*(m for _, m in parts), strict=True)]
    assert layer_routing(counts, mass, 0.9).load_max == max(counts) / 4
    assert layer_routing(counts, mass, 0.9).dead_experts == 0


def test_one_expert_is_always_balanced() -> None:
    assert layer_routing([5], [5.0], 0.0).max_violation == 0.0


def test_a_step_without_tokens_is_reported_as_zeros() -> None:
    routing = layer_routing([0, 0], [0.0, 0.0], float("nan"))
    assert (routing.load_max, routing.entropy, routing.dead_experts) == (0.0, 0.0, 2)


def test_the_record_is_json() -> None:
    record = layer_routing([1, 3], [1.0, 1.0], 1.0).to_json()
    assert record["counts"] == [1, 3]
    assert record["load_max"] == 1.5
    assert record["dropped_tokens"] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_bias_rises_where_load_is_missing_and_stays_at_the_mean(dtype: torch.dtype) -> None:
    bias = torch.tensor([0.5, 0.0, -0.5, 1.0], dtype=dtype)
    moved = updated_bias(bias, torch.tensor([10, 0, 4, 2]), 1e-3)
    assert moved.dtype == dtype
    assert torch.equal(moved, bias + 1e-3 * torch.tensor([-1.0, 1.0, 0.0, 1.0], dtype=dtype))
    assert torch.equal(bias, torch.tensor([0.5, 0.0, -0.5, 1.0], dtype=dtype))


def test_the_mean_is_compared_exactly() -> None:
    """A third of 10⁹ + 1 choices is no floating-point number; an expert one choice above the mean still goes down."""
    counts = torch.tensor([333_333_334, 333_333_334, 333_333_334 - 3])
    assert updated_bias(torch.zeros(3), counts, 1.0).tolist() == [-1.0, -1.0, 1.0]
    assert updated_bias(torch.zeros(3), torch.full((3,), 333_333_333), 1.0).tolist() == [0.0, 0.0, 0.0]


def test_layers_are_updated_together_or_apart_alike() -> None:
    bias, counts = torch.zeros(2, 3), torch.tensor([[3, 2, 1], [0, 0, 9]])
    together = updated_bias(bias, counts, 0.1)
    assert torch.equal(together, torch.stack([updated_bias(b, c, 0.1) for b, c in zip(bias, counts, strict=True)]))


def test_a_step_without_tokens_moves_no_bias() -> None:
    assert torch.equal(updated_bias(torch.ones(4), torch.zeros(4, dtype=torch.int64), 0.1), torch.ones(4))


def test_feedback_evens_out_a_skewed_router() -> None:
    generator = torch.Generator().manual_seed(0)
    skew, bias = torch.linspace(-1.5, 1.5, 8), torch.zeros(8)

    def load() -> torch.Tensor:
        scores = (torch.randn(2048, 8, generator=generator) + skew).softmax(-1)
        return torch.bincount((scores + bias).topk(2).indices.flatten(), minlength=8)

    before = load()
    for _ in range(300):
        bias = updated_bias(bias, load(), 2e-3)
    after = load()
    assert before.max() / before.float().mean() > 2.0
    assert after.max() / after.float().mean() < 1.25
