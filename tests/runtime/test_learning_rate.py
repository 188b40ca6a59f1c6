"""Schedules are exact at their edges."""

from __future__ import annotations

import itertools
import math

import pytest

from moegraph.runtime.learning_rate import learning_rate
from moegraph.specs.schema import Constant, Cosine, Wsd

LR = 3e-4
SCHEDULES = [
    Cosine(kind="cosine", warmup=10, final=0.1),
    Wsd(kind="wsd", warmup=10, decay=20, final=0.05),
    Constant(kind="constant", warmup=10),
]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warm_up_is_linear_and_starts_above_zero(schedule: Cosine | Wsd | Constant) -> None:
    assert learning_rate(1, 100, schedule, LR) == LR / 10
    assert learning_rate(5, 100, schedule, LR) == LR * 5 / 10
    assert learning_rate(10, 100, schedule, LR) == LR


@pytest.mark.parametrize(("schedule", "last"), list(zip(SCHEDULES, [0.1 * LR, 0.05 * LR, LR], strict=True)))
def test_the_last_step_has_the_final_rate(schedule: Cosine | Wsd | Constant, last: float) -> None:
    assert learning_rate(100, 100, schedule, LR) == last


def test_cosine_is_half_way_in_the_middle_and_always_falls() -> None:
    schedule = Cosine(kind="cosine", warmup=10, final=0.1)
    assert learning_rate(55, 100, schedule, LR) == pytest.approx(LR * 0.55, rel=1e-14)
    rates = [learning_rate(step, 100, schedule, LR) for step in range(10, 101)]
    assert all(a > b for a, b in itertools.pairwise(rates))


def test_cosine_equals_its_formula() -> None:
    rate = learning_rate(31, 100, Cosine(kind="cosine", warmup=10, final=0.2), 1.0)
    assert rate == pytest.approx(0.2 + 0.8 * (1 + math.cos(math.pi * 21 / 90)) / 2, rel=1e-14)


def test_wsd_is_flat_until_the_decay_and_then_linear() -> None:
    schedule = Wsd(kind="wsd", warmup=10, decay=20, final=0.0)
    assert {learning_rate(step, 100, schedule, LR) for step in range(10, 81)} == {LR}
    assert learning_rate(81, 100, schedule, LR) == pytest.approx(LR * 0.95, rel=1e-14)
    assert learning_rate(90, 100, schedule, LR) == pytest.approx(LR * 0.5, rel=1e-14)
    assert learning_rate(100, 100, schedule, LR) == 0.0


def test_wsd_without_decay_stays() -> None:
    assert learning_rate(100, 100, Wsd(kind="wsd", warmup=0, decay=0), LR) == LR


def test_without_warm_up_the_first_step_has_the_whole_rate() -> None:
    for schedule in (Cosine(kind="cosine"), Wsd(kind="wsd", decay=5), Constant(kind="constant")):
        assert learning_rate(1, 100, schedule, LR) == LR


def test_a_run_shorter_than_its_warm_up_only_warms_up() -> None:
    for schedule in (Cosine(kind="cosine", warmup=10), Constant(kind="constant", warmup=10)):
        assert learning_rate(4, 4, schedule, LR) == LR * 4 / 10


def test_a_run_of_one_step_has_a_rate() -> None:
    assert learning_rate(1, 1, Cosine(kind="cosine", warmup=1, final=0.1), LR) == LR
    assert learning_rate(1, 1, Cosine(kind="cosine", warmup=0, final=0.1), LR) == LR


@pytest.mark.parametrize("step", [0, 101, -1])
def test_steps_outside_the_run_are_refused(step: int) -> None:
    with pytest.raises(ValueError, match=f"step {step} is not within 1 to 100"):
        learning_rate(step, 100, Constant(kind="constant"), LR)
