"""`moegraph inspect SPEC --schedule`: which stage has which blocks, on which rank, and what every rank does when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from moegraph.cli.output import counted, print_json, print_table

if TYPE_CHECKING:
    from moegraph.graph.cost import Cost
    from moegraph.graph.program import Instance, Program
    from moegraph.graph.schedule import Action, Timed, Timeline
    from moegraph.specs.schema.run import Layout

MOST_SLOTS = 1000


class Stage(NamedTuple):
    """One stage of a program: its rank, its blocks, what they cost together, and its share of all operations."""

    number: int
    rank: int
    blocks: tuple[Instance, ...]
    cost: Cost
    share: float


def print_schedule(program: Program, *, as_json: bool) -> None:
    """Prints the stages of a program and the timeline of one step."""
    from moegraph.graph.schedule import rank_orders, simulate

    layout = program.spec.layout
    stages = _stages(program)
    timeline = simulate(rank_orders(layout), [stage.cost.flops for stage in stages])
    if as_json:
        print_json(_json(layout, stages, timeline))
        return
    print(f"schedule {layout.schedule}: pp {layout.pp}, {_some(len(stages), 'stage')}, ", end="")
    print(_some(layout.microbatches, "micro-batch", "micro-batches"))
    print()
    columns = [">stage", ">rank", "blocks", ">forward", ">share", ">parameters"]
    print_table(columns, map(_row, stages))
    print()
    print("\n".join(timeline_lines(timeline, _names_stages(layout))))
    print()
    busy = [[rank, *_times(timeline, rank)] for rank in range(layout.pp)]
    print_table([">rank", ">actions", ">busy", ">bubble"], busy)
    print(f"bubble of all ranks: {timeline.bubble():.1%}")
    print("F forward 1, B backward 2, I its gradient of the input 1, W its gradient of the weights 1, each times the")
    print("stage's share of the forward operations; communication and the optimizer are not in it")


def _some(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"


def _stages(program: Program) -> list[Stage]:
    from moegraph.graph.cost import Cost, instance_costs
    from moegraph.graph.placement import num_stages, rank_of_stage

    layout = program.spec.layout
    costs = instance_costs(program)
    total = sum(cost.flops for cost in costs)
    stages = []
    for number in range(num_stages(layout)):
        own = [pair for pair in zip(program.instances, costs, strict=True) if pair[0].stage == number]
        cost = Cost(sum(each.flops for _, each in own), sum(each.parameters for _, each in own))
        blocks = tuple(instance for instance, _ in own)
        stages.append(Stage(number, rank_of_stage(layout, number), blocks, cost, cost.flops / total))
    return stages


def _row(stage: Stage) -> list[str]:
    from moegraph.graph.instances import blocks_text

    flops = counted(stage.cost.flops, operations=True)
    parameters = counted(stage.cost.parameters)
    return [str(stage.number), str(stage.rank), blocks_text(stage.blocks), flops, f"{stage.share:.1%}", parameters]


def _times(timeline: Timeline, rank: int) -> list[str]:
    bubble = timeline.bubble(rank)
    return [str(len(timeline.ranks[rank])), f"{1 - bubble:.1%}", f"{bubble:.1%}"]


def _names_stages(layout: Layout) -> bool:
    from moegraph.specs.rules_layout import STAGES_PER_RANK

    return STAGES_PER_RANK[layout.schedule] > 1


def timeline_lines(timeline: Timeline, with_stages: bool) -> list[str]:
    """One line per rank. A slot is as long as the shortest action, and shows what runs in its middle: an action in its
    first slot by name, then `-`; `.` where the rank idles."""
    shortest = min(timed.end - timed.start for rank in timeline.ranks for timed in rank if timed.end > timed.start)
    slots = min(-(-timeline.end // shortest), MOST_SLOTS)
    rows = [_slots(rank, slots, timeline.end, with_stages) for rank in timeline.ranks]
    width = max(len(text) for row in rows for text in row)
    name = len(f"rank {len(rows) - 1}")
    lines = [
        f"{f'rank {rank}':<{name}}  " + " ".join(text.ljust(width) for text in row).rstrip()
        for rank, row in enumerate(rows)
    ]
    if slots == MOST_SLOTS:
        lines.append(f"drawn in {slots} slots; actions shorter than one may not show")
    return lines


def _slots(rank: Sequence[Timed], slots: int, end: int, with_stages: bool) -> list[str]:
    texts = ["."] * slots
    position, named = 0, -1
    for slot in range(slots):
        middle = (2 * slot + 1) * end  # in units of 1 / (2 · slots)
        while position < len(rank) and rank[position].end * 2 * slots <= middle:
            position += 1
        if position < len(rank) and rank[position].start * 2 * slots <= middle:
            texts[slot] = _label(rank[position].action, with_stages) if named != position else "-"
            named = position
    return texts


def _label(action: Action, with_stages: bool) -> str:
    return str(action) if with_stages else f"{action.kind}{action.microbatch}"


def _json(layout: Layout, stages: Sequence[Stage], timeline: Timeline) -> dict[str, Any]:
    """Times are in forwards of a mean stage."""
    from moegraph.graph.placement import stages_of_rank

    unit = sum(stage.cost.flops for stage in stages) / len(stages)
    return {
        "schedule": layout.schedule,
        "pp": layout.pp,
        "microbatches": layout.microbatches,
        "stages": [
            {
                "stage": stage.number,
                "rank": stage.rank,
                "blocks": [instance.prefix for instance in stage.blocks],
                "flops": stage.cost.flops,
                "share": stage.share,
                "parameters": stage.cost.parameters,
            }
            for stage in stages
        ],
        "ranks": [
            {
                "rank": rank,
                "stages": list(stages_of_rank(layout, rank)),
                "bubble": timeline.bubble(rank),
                "actions": [
                    {**action._asdict(), "start": start / unit, "end": end / unit} for action, start, end in actions
                ],
            }
            for rank, actions in enumerate(timeline.ranks)
        ],
        "end": timeline.end / unit,
        "bubble": timeline.bubble(),
    }
