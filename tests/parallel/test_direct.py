"""Transport `direct` on the CPU, where its declared equivalent runs over gloo: bitwise what `padded` gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.parallel.steps import Outcome, layout_spec, run_steps
from tests.ranks import RankPool


def equal(found: Outcome, expected: Outcome) -> None:
    """Every number, gradient and weight, to the last bit."""
    assert found.numbers == expected.numbers
    for step, (gradients, those) in enumerate(zip(found.gradients, expected.gradients, strict=True)):
        for name, value in those.items():
            assert torch.equal(gradients[name], value), (step, name)
    for name, weight in expected.weights.items():
        assert torch.equal(found.weights[name], weight), name


LAYOUTS: list[dict[str, Any]] = [
    {"dp": 2, "ep": 2, "capacity": 2.0},
    {"dp": 4, "ep": 2, "capacity": 2.0, "microbatches": 2},
    {"dp": 2, "ep": 2, "pp": 2, "capacity": 2.0, "microbatches": 2},
    {"dp": 2, "ep": 2, "capacity": 1.0, "overflow": "drop"},
]


EVERY_DAY = [(LAYOUTS[3], "none")]
CASES = [
    pytest.param(layout, policy, marks=() if (layout, policy) in EVERY_DAY else pytest.mark.slow)
    for layout in LAYOUTS
    for policy in ("none", "full")
]


@pytest.mark.parametrize(("layout", "policy"), CASES)
def test_steps_are_bitwise_those_of_padded(ranks: RankPool, layout: dict[str, Any], policy: str) -> None:
    world = layout["dp"] * layout.get("pp", 1)
    direct, padded = (
        ranks.run(world, run_steps, layout_spec(f"passes.recompute.policy={policy}", **layout, transport=transport))[0]
        for transport in ("direct", "padded")
    )
    equal(direct, padded)
    assert direct.replays == 0


@pytest.mark.slow
def test_a_step_that_overflows_is_computed_again_with_more_room(ranks: RankPool) -> None:
    """A buffer holds what its rank's peers together may send, so it overflows later than a bucket, but it does."""
    layout: dict[str, Any] = {"dp": 2, "ep": 2, "transport": "direct"}
    small = ranks.run(2, run_steps, layout_spec(**layout, capacity=1.0))[0]
    large = ranks.run(2, run_steps, layout_spec(**layout, capacity=2.0))[0]
    assert small.replays == 1
    assert small.capacity == 2.0
    equal(small, large)
