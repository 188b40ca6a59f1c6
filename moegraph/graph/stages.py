"""Pipeline stages: which stage each block of a program belongs to.

A stage is a run of neighbouring blocks. `assign_stages` takes them from `layout.stages`, or cuts the layers where the
largest stage is smallest; the embedding goes with the first layer and the head with the last one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, pairwise

from moegraph.errors import CheckFailed
from moegraph.graph.cost import Cost, instance_costs
from moegraph.graph.placement import num_stages
from moegraph.graph.program import Instance, Program
from moegraph.specs.stages import stage_of_block


def assign_stages(program: Program) -> tuple[Instance, ...]:
    """The instances of a program, each with the stage that the spec's layout gives it."""
    layout, layers = program.spec.layout, program.spec.model.num_layers
    places = _places(program.instances)
    if layout.stages is not None:
        stages = stage_of_block(layout.stages, layers)
    else:
        items = [Cost(0, 0)] * layers
        for place, cost in zip(places, instance_costs(program), strict=True):
            item = min(max(place - 1, 0), layers - 1)
            items[item] = items[item].plus(cost)
        sizes = balanced_cut(tuple(items), num_stages(layout))
        of_layer = [stage for stage, size in enumerate(sizes) for _ in range(size)]
        stages = (0, *of_layer, len(sizes) - 1)
    return tuple(
        replace(instance, stage=stages[place]) for instance, place in zip(program.instances, places, strict=True)
    )


def _places(instances: Sequence[Instance]) -> list[int]:
    """Where each block stands: 0 before the layers, 1 + the layer's number, 1 + the number of layers after them."""
    layers = [instance.layer for instance in instances if instance.layer is not None]
    places, after = [], False
    for instance in instances:
        after = after or instance.layer is not None
        places.append(instance.layer + 1 if instance.layer is not None else len(layers) + 1 if after else 0)
    return places


@lru_cache(maxsize=16)
def balanced_cut(costs: tuple[Cost, ...], stages: int) -> tuple[int, ...]:
    """How many of the items, in order, go into each of `stages` non-empty stages.

    Of all cuts these are chosen, each among those that are left: those whose largest stage has the fewest operations;
    whose largest stage has the fewest parameters; whose operations are most even (least sum of squares); and of equal
    ones the cut whose last stage has the fewest items, then the one before it, and so on. Exact, by dynamic programming
    over (stages, items). Raises ValueError for more stages than items.
    """
    if not 1 <= stages <= len(costs):
        raise ValueError(f"{len(costs)} items cannot be cut into {stages} stages")
    flops = list(accumulate((cost.flops for cost in costs), initial=0))
    parameters = list(accumulate((cost.parameters for cost in costs), initial=0))

    def within(first: int, end: int) -> bool:
        return flops[end] - flops[first] <= most_flops and parameters[end] - parameters[first] <= most_parameters

    most_flops, most_parameters = flops[-1], parameters[-1]
    most_flops, _ = _best(len(costs), stages, max, lambda a, b: flops[b] - flops[a])
    most_parameters, _ = _best(
        len(costs), stages, max, lambda a, b: parameters[b] - parameters[a] if within(a, b) else None
    )
    _, ends = _best(len(costs), stages, operator.add, lambda a, b: (flops[b] - flops[a]) ** 2 if within(a, b) else None)
    return tuple(b - a for a, b in pairwise((0, *ends)))


def _best(
    items: int, stages: int, join: Callable[[int, int], int], span: Callable[[int, int], int | None]
) -> tuple[int, tuple[int, ...]]:
    """The least value of a cut, and where its stages end.

    `span(first, end)` is the value of a stage, or None where it is not allowed; it never falls, and never becomes
    allowed, as the stage grows. `join` puts a stage's value to that of the stages before it: max, or a sum.
    """
    value: dict[int, int] = {0: 0}
    choices: list[dict[int, int]] = []
    for stage in range(1, stages + 1):
        following: dict[int, int] = {}
        chosen: dict[int, int] = {}
        for end in range(stage, items - (stages - stage) + 1):
            for first in range(end - 1, stage - 2, -1):  # from the shortest stage on, so that ties keep it
                own = span(first, end)
                if own is None or (end in following and own > following[end]):
                    break
                if first in value and (end not in following or join(value[first], own) < following[end]):
                    following[end], chosen[end] = join(value[first], own), first
        value = following
        choices.append(chosen)
    ends = [items]
    for chosen in reversed(choices[1:]):
        ends.append(chosen[ends[-1]])
    return value[items], tuple(reversed(ends))


def check_placement(before: Sequence[Instance], after: Sequence[Instance], made_by: str) -> None:
    """What must hold when a pass places blocks: they are the same blocks in the same order, and stages count up from 0
    without a gap. Raises `CheckFailed`."""
    if [replace(each, stage=0) for each in before] != [replace(each, stage=0) for each in after]:
        raise CheckFailed(f"after {made_by}: placing may change the stage of blocks, not which blocks there are")
    stages = [0, *(each.stage for each in after)]
    for (was, now), instance in zip(pairwise(stages), after, strict=True):
        if now not in (was, was + 1) or (instance is after[0] and now != 0):
            raise CheckFailed(
                f"after {made_by}: {instance.prefix} is in stage {now} and follows stage {was}; stages are runs of "
                "neighbouring blocks, counted from 0"
            )
