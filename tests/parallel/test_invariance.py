"""The result of training does not depend on the layout: losses, every gradient, the norm, expert counts, biases and
weights after each of three steps, in float64, equal those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.parallel.cases import Case, covering_cases, every_case, name_of
from tests.parallel.steps import Outcome, layout_spec, run_steps
from tests.ranks import RankPool

COVERING = covering_cases()
REST = [each for each in every_case() if each not in COVERING]
REPEATED = ("recompute", "schedule")


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp_min(1e-300))


def spec_of(each: Case, **more: Any) -> Any:
    layout = {key: value for key, value in each.items() if key != "recompute"}
    overrides = [f"passes.recompute.policy={each['recompute']}"]
    if each["pp"] == 1 and each["schedule"] not in ("gpipe", "1f1b"):
        del layout["schedule"]
    return layout_spec(*overrides, **{**layout, **more})


def compare(found: Outcome, expected: Outcome, bound: float = 1e-10) -> None:
    """Everything that must not depend on the layout."""
    for step, (a, b) in enumerate(zip(found.numbers, expected.numbers, strict=True)):
        for name in ("loss", "balance", "z", "norm"):
            assert a[name] == pytest.approx(b[name], rel=bound, abs=0), (step, name)
        assert a["expert_counts"] == b["expert_counts"], step
        assert a["router_entropy"] == pytest.approx(b["router_entropy"], rel=bound)
    for step, (gradients, those) in enumerate(zip(found.gradients, expected.gradients, strict=True)):
        assert gradients.keys() == those.keys()
        for name in those:
            assert error(gradients[name], those[name]) < bound, (step, name)
    assert found.weights.keys() == expected.weights.keys()
    for name, weight in expected.weights.items():
        assert error(found.weights[name], weight) < bound, name


_references: dict[tuple[Any, ...], Outcome] = {}


def reference(ranks: RankPool, *key: Any, **layout: Any) -> Outcome:
    """One process, one micro-batch; run once for what it is compared with."""
    if (key, tuple(layout.items())) not in _references:
        overrides = key[0] if key else ()
        steps_options = dict(key[1]) if len(key) > 1 else {}
        (outcome,) = ranks.run(1, run_steps, layout_spec(*overrides, **layout), *steps_options.values())
        _references[key, tuple(layout.items())] = outcome
    return _references[key, tuple(layout.items())]


def check(ranks: RankPool, each: Case) -> None:
    expected = reference(ranks)
    spec = spec_of(each)
    found = ranks.run(spec.layout.world, run_steps, spec)[0]
    compare(found, expected)
    assert found.replays == 0


@pytest.mark.parametrize("each", COVERING, ids=name_of)
def test_a_layout_of_the_covering_set(ranks: RankPool, each: Case) -> None:
    check(ranks, each)


@pytest.mark.slow
@pytest.mark.parametrize("each", REST, ids=name_of)
def test_a_layout_of_the_product(ranks: RankPool, each: Case) -> None:
    check(ranks, each)


def test_the_covering_set_is_small() -> None:
    assert len(COVERING) <= 20
