"""The global norm counts each parameter once, wherever its parts lie."""

from __future__ import annotations

import math

import pytest
import torch

from moegraph.runtime.gradient_norm import clip_factor, global_norm, is_finite, sum_of_squares


def test_a15_the_norm_is_the_same_for_every_layout_of_experts() -> None:
    experts = torch.stack([torch.full((3, 2), float(2 * (e + 1))) for e in range(4)])
    dense = torch.tensor([1.0, 2.0])
    expected = math.sqrt(5 + 6 * sum((2 * (e + 1)) ** 2 for e in range(4)))
    for ep in (1, 2, 4):
        size = 4 // ep
        shards = [sum_of_squares({"experts": experts[r * size :][:size]}) for r in range(ep)]
        total = sum_of_squares({"dense": dense}) + sum(shards)
        assert float(total.sqrt()) == pytest.approx(expected, rel=1e-6)
    assert float(global_norm({"dense": dense, "experts": experts})) == pytest.approx(expected, rel=1e-6)


def test_the_norm_equals_that_of_all_elements_in_a_row() -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = {f"p{i}": torch.randn(7, i + 1, generator=generator, dtype=torch.float64) for i in range(9)}
    flat = torch.cat([g.flatten() for g in gradients.values()])
    assert float(global_norm(gradients)) == pytest.approx(float(flat.square().sum().sqrt()), rel=1e-14)


def test_the_order_of_the_mapping_changes_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    gradients = {f"p{i}": torch.randn(50, generator=generator) * 10.0**i for i in range(-8, 8)}
    backwards = dict(reversed(gradients.items()))
    assert torch.equal(global_norm(gradients), global_norm(backwards))


def test_many_large_tensors_do_not_overflow_between_tensors() -> None:
    gradients = {f"p{i}": torch.full((4,), 5e18) for i in range(64)}
    assert float(global_norm(gradients)) == pytest.approx(16 * 5e18, rel=1e-6)


def test_gradients_within_the_norm_are_left_exactly_alone() -> None:
    assert clip_factor(1.0, 1.0) == 1.0
    assert clip_factor(0.0, 1.0) == 1.0
    assert clip_factor(7.0, None) == 1.0


def test_clipped_gradients_have_the_norm_asked_for() -> None:
    gradients = {"a": torch.tensor([3.0, 0.0], dtype=torch.float64), "b": torch.tensor([[4.0]], dtype=torch.float64)}
    factor = clip_factor(float(global_norm(gradients)), 0.5)
    assert factor == pytest.approx(0.1, rel=1e-15)
    assert float(global_norm({name: g * factor for name, g in gradients.items()})) == pytest.approx(0.5, rel=1e-15)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_number_anywhere_shows_in_the_norm(bad: float) -> None:
    gradients = {"a": torch.zeros(1000), "b": torch.zeros(3)}
    assert is_finite(global_norm(gradients))
    gradients["a"][777] = bad
    assert not is_finite(global_norm(gradients))
