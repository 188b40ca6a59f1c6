"""Placement: a stage runs on the rank that torch's schedule expects it on."""

from __future__ import annotations

import pytest

from moegraph.graph.placement import num_stages, rank_of_stage, stages_of_rank
from moegraph.specs.schema.run import Layout
from tests.graph.torch_schedules import NAMES, schedule_of_several_stages

SEVERAL = [name for name in NAMES if name not in ("gpipe", "1f1b")]


@pytest.mark.parametrize("pp", [2, 3, 4, 8])
@pytest.mark.parametrize("name", SEVERAL)
def test_stages_are_where_torch_puts_them(name: str, pp: int) -> None:
    layout = Layout.model_validate({"pp": pp, "schedule": name})
    torch_places = schedule_of_several_stages(name, pp, 2 * pp).stage_index_to_group_rank
    assert {stage: rank_of_stage(layout, stage) for stage in range(num_stages(layout))} == torch_places


@pytest.mark.parametrize("name", NAMES)
def test_both_directions_agree(name: str) -> None:
    layout = Layout.model_validate({"pp": 4, "schedule": name})
    for rank in range(4):
        assert [rank_of_stage(layout, stage) for stage in stages_of_rank(layout, rank)] == [rank] * (
            num_stages(layout) // 4
        )


@pytest.mark.parametrize(
    ("name", "stages"),
    [
        ("gpipe", [(0,), (1,), (2,)]),
        ("1f1b", [(0,), (1,), (2,)]),
        ("interleaved_zero_bubble", [(0, 3), (1, 4), (2, 5)]),
        ("dual_pipe_v", [(0, 5), (1, 4), (2, 3)]),
    ],
)
def test_stages_of_three_ranks(name: str, stages: list[tuple[int, ...]]) -> None:
    layout = Layout.model_validate({"pp": 3, "schedule": name})
    assert [stages_of_rank(layout, rank) for rank in range(3)] == stages


def test_what_is_not_there_is_refused() -> None:
    layout = Layout(pp=2)
    for stage in (-1, 2):
        with pytest.raises(ValueError, match=f"no stage {stage} among 2"):
            rank_of_stage(layout, stage)
        with pytest.raises(ValueError, match=f"no pipeline rank {stage} among 2"):
            stages_of_rank(layout, stage)
