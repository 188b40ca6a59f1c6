"""Schedules on paper: the order is torch's, the times are those of the textbook, and what cannot run is told."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from moegraph.graph.placement import num_stages, rank_of_stage
from moegraph.graph.schedule import Action, Timeline, rank_orders, simulate
from moegraph.specs.schema.run import Layout
from tests.graph.torch_schedules import NAMES, run_single_stage, schedule_of_several_stages


def layout_of(name: str, pp: int, microbatches: int) -> Layout:
    return Layout.model_validate({"pp": pp, "schedule": name, "microbatches": microbatches})


def timeline_of(name: str, pp: int, microbatches: int) -> Timeline:
    """With stages of equal cost 1."""
    layout = layout_of(name, pp, microbatches)
    return simulate(rank_orders(layout), [1] * num_stages(layout))


@pytest.mark.parametrize(("pp", "microbatches"), [(1, 1), (1, 3), (2, 2), (3, 4), (4, 4), (4, 9)])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_the_order_of_one_stage_per_rank_is_what_torch_runs(name: str, pp: int, microbatches: int) -> None:
    for rank, order in enumerate(rank_orders(layout_of(name, pp, microbatches))):
        assert list(map(str, order)) == run_single_stage(name, rank, pp, microbatches)


@pytest.mark.parametrize("name", ["interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble", "dual_pipe_v"])
def test_the_order_of_two_stages_per_rank_is_torchs_own(name: str) -> None:
    orders = rank_orders(layout_of(name, 3, 6))
    for rank, actions in schedule_of_several_stages(name, 3, 6).pipeline_order.items():
        flat = [part for action in actions if action for part in (action.sub_actions or (action,))]
        assert list(map(str, orders[rank])) == list(map(str, flat))


@pytest.mark.parametrize(("pp", "microbatches"), [(2, 4), (4, 8), (3, 6)])
@pytest.mark.parametrize("name", NAMES)
def test_every_stage_sees_every_micro_batch_forward_and_back_once(name: str, pp: int, microbatches: int) -> None:
    layout = layout_of(name, pp, microbatches)
    done: Counter[tuple[int, int, str]] = Counter()
    for rank, order in enumerate(rank_orders(layout)):
        for stage, kind, microbatch in order:
            assert rank_of_stage(layout, stage) == rank
            for part in "IW" if kind == "B" else kind:
                done[stage, microbatch, part] += 1
    expected = [(s, m, part) for s in range(num_stages(layout)) for m in range(microbatches) for part in "FIW"]
    assert done == Counter(expected)


@pytest.mark.parametrize(("pp", "microbatches"), [(2, 2), (4, 4), (4, 12), (8, 8)])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_the_bubble_of_equal_stages_is_that_of_the_textbook(name: str, pp: int, microbatches: int) -> None:
    """(p - 1) / (m + p - 1), arXiv 1811.06965 and 2104.04473."""
    timeline = timeline_of(name, pp, microbatches)
    assert timeline.end == 3 * (microbatches + pp - 1)
    assert timeline.bubble() == pytest.approx((pp - 1) / (microbatches + pp - 1))
    assert all(timeline.bubble(rank) == pytest.approx(timeline.bubble()) for rank in range(pp))


def test_better_schedules_idle_less() -> None:
    bubble = {name: timeline_of(name, 4, 8).bubble() for name in NAMES}
    assert bubble["1f1b"] == bubble["gpipe"] > bubble["interleaved_1f1b"]
    for name in ("interleaved_zero_bubble", "zbv_zero_bubble", "dual_pipe_v"):
        assert bubble[name] < bubble["interleaved_1f1b"]


@pytest.mark.parametrize("name", NAMES)
def test_nothing_starts_before_what_it_needs(name: str) -> None:
    layout = layout_of(name, 3, 6)
    costs = [3, 1, 4, 1, 5, 9][: num_stages(layout)]
    timeline = simulate(rank_orders(layout), costs)
    times = {timed.action: timed for rank in timeline.ranks for timed in rank}
    for (stage, kind, microbatch), start, end in times.values():
        assert end - start == costs[stage] * (2 if kind == "B" else 1)
        if kind == "F" and stage:
            assert start >= times[Action(stage - 1, "F", microbatch)].end
        if kind in "BI" and stage + 1 < len(costs):
            after = [times.get(Action(stage + 1, each, microbatch)) for each in "BI"]
            assert start >= next(timed.end for timed in after if timed is not None)
        if kind == "W":
            assert start >= times[Action(stage, "I", microbatch)].end
    for rank in timeline.ranks:
        assert all(before.end <= after.start for before, after in pairwise(rank))


def test_an_unequal_stage_makes_the_others_wait() -> None:
    orders = rank_orders(layout_of("gpipe", 2, 2))
    timeline = simulate(orders, [1, 3])
    assert [(str(t.action), t.start, t.end) for t in timeline.ranks[1]] == [
        ("1F0", 1, 4), ("1F1", 4, 7), ("1B0", 7, 13), ("1B1", 13, 19),
    ]  # fmt: skip
    assert timeline.end == 21
    assert timeline.bubble(0) == pytest.approx(1 - 6 / 21)
    assert timeline.bubble() == pytest.approx(1 - (6 + 18) / 42)


def test_orders_that_wait_for_each_other_are_told() -> None:
    orders = [[Action(0, "F", 0), Action(0, "B", 0), Action(0, "F", 1)], [Action(1, "F", 1), Action(1, "F", 0)]]
    with pytest.raises(ValueError, match="for ever: 0B0, 1F1"):
        simulate(orders, [1, 1])
