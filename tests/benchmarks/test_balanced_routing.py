"""Balanced routing for benchmarks: every expert as often, no expert twice for a token, nothing else changed."""

from __future__ import annotations

import pytest
import torch

from moegraph.benchmarks.balanced_routing import balanced_choice, register
from moegraph.compiled import compile
from tests.passes.user_passes import restored_registry
from tests.small_models import small_spec


@pytest.mark.parametrize(("tokens", "experts", "k"), [(16384, 8, 4), (16384, 64, 4), (4096, 128, 8), (1000, 6, 5)])
def test_every_expert_is_chosen_about_as_often_and_once_per_token(tokens: int, experts: int, k: int) -> None:
    ids = balanced_choice(torch.randn(tokens, experts), k)
    assert (ids.sort(1).values.diff(dim=1) > 0).all()
    counts = ids.flatten().bincount(minlength=experts)
    fair = tokens * k / experts
    assert 0.97 * fair < counts.min()
    assert counts.max() < 1.03 * fair


def test_only_the_choice_of_experts_changes_and_only_after_it_was_asked_for() -> None:
    plain = compile(small_spec())
    with restored_registry():
        register()
        found = compile(small_spec())
    assert "balance-routing" not in [record.name for record in plain.records]
    record = found.record("balance-routing")
    assert record.count > 0
    targets = [str(node.target) for node in found.program.units["moe"].graphs["forward"].graph.nodes]
    assert "moegraph.balanced_choice.default" in targets
    assert "moegraph.choose_experts.default" not in targets
    assert len(targets) == len(list(plain.program.units["moe"].graphs["forward"].graph.nodes))
