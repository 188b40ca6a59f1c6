"""Which pipeline rank runs which stage: a property of the schedule.

- gpipe, 1f1b: stage r on rank r.
- interleaved_1f1b, interleaved_zero_bubble: in a loop, stages r and r + pp on rank r.
- zbv_zero_bubble, dual_pipe_v: in a V, stages r and 2 · pp - 1 - r on rank r; the first and the last one share rank 0.
"""

from __future__ import annotations

from moegraph.specs.rules_layout import STAGES_PER_RANK
from moegraph.specs.schema.run import Layout

V_SCHEDULES = frozenset({"zbv_zero_bubble", "dual_pipe_v"})


def num_stages(layout: Layout) -> int:
    """Stages of the whole pipeline."""
    return layout.pp * STAGES_PER_RANK[layout.schedule]


def rank_of_stage(layout: Layout, stage: int) -> int:
    """The pipeline rank that runs a stage. Raises ValueError for a stage that there is not."""
    if not 0 <= stage < num_stages(layout):
        raise ValueError(f"there is no stage {stage} among {num_stages(layout)}")
    turn, place = divmod(stage, layout.pp)
    backwards = turn % 2 == 1 and layout.schedule in V_SCHEDULES
    return layout.pp - 1 - place if backwards else place


def stages_of_rank(layout: Layout, rank: int) -> tuple[int, ...]:
    """The stages that a pipeline rank runs, ascending. Raises ValueError for a rank that there is not."""
    if not 0 <= rank < layout.pp:
        raise ValueError(f"there is no pipeline rank {rank} among {layout.pp}")
    return tuple(stage for stage in range(num_stages(layout)) if rank_of_stage(layout, stage) == rank)
