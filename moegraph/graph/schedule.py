"""A pipeline schedule on paper: what each rank does in which order, and when, without any process group.

    Layout ─rank_orders─▶ actions of each rank ─simulate─▶ start and end of each, idle time

Interleaved, zero-bubble and V schedules are asked of torch's own classes; GPipe and 1F1B, whose classes keep no order,
are written down here. The simulation is of the least that a schedule takes: an action starts once its rank is free and
what it needs is there, and nothing travels.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moegraph._torch_compat import pipeline_orders
from moegraph.specs.rules_layout import STAGES_PER_RANK
from moegraph.specs.schema.run import Layout

COSTS = {"F": 1, "B": 2, "I": 1, "W": 1}  # times the stage's forward
_TORCH_NAMES = {
    "interleaved_1f1b": "Interleaved1F1B",
    "interleaved_zero_bubble": "InterleavedZeroBubble",
    "zbv_zero_bubble": "ZBVZeroBubble",
    "dual_pipe_v": "DualPipeV",
}
_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")


class Action(NamedTuple):
    """One step of a rank: F forward, B backward, or its halves I (gradient of the input) and W (of the weights)."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        """As torch writes it: `3F0` is stage 3, forward, micro-batch 0."""
        return f"{self.stage}{self.kind}{self.microbatch}"


class Timed(NamedTuple):
    """An action with its time, in the unit of the stages' costs."""

    action: Action
    start: int
    end: int


@dataclass(frozen=True)
class Timeline:
    """What every rank does when. The step takes as long as its last rank."""

    ranks: tuple[tuple[Timed, ...], ...]

    @property
    def end(self) -> int:
        """When the last action ends."""
        return max(timed.end for rank in self.ranks for timed in rank)

    def bubble(self, rank: int | None = None) -> float:
        """The share of the step that a rank idles, or all ranks together."""
        ranks = self.ranks if rank is None else (self.ranks[rank],)
        busy = sum(timed.end - timed.start for each in ranks for timed in each)
        return 1 - busy / (self.end * len(ranks))


def rank_orders(layout: Layout) -> list[list[Action]]:
    """The actions of each pipeline rank, in the order it runs them."""
    pp, many = layout.pp, layout.microbatches
    if layout.schedule == "gpipe":
        return [[*_run(rank, "F", range(many)), *_run(rank, "B", range(many))] for rank in range(pp)]
    if layout.schedule == "1f1b":
        return [_one_forward_one_backward(rank, pp, many) for rank in range(pp)]
    orders = pipeline_orders(_TORCH_NAMES[layout.schedule], pp, STAGES_PER_RANK[layout.schedule], many)
    return [[_parse(text) for text in order] for order in orders]


def _run(stage: int, kind: str, microbatches: range) -> list[Action]:
    return [Action(stage, kind, microbatch) for microbatch in microbatches]


def _one_forward_one_backward(rank: int, pp: int, many: int) -> list[Action]:
    """Forwards until the first gradient can arrive, then a backward and a forward in turn, then the backwards left."""
    warmup = min(many, pp - rank)
    actions = _run(rank, "F", range(warmup))
    for microbatch in range(many - warmup):
        actions += [Action(rank, "B", microbatch), Action(rank, "F", microbatch + warmup)]
    return actions + _run(rank, "B", range(many - warmup, many))


def _parse(text: str) -> Action:
    match = _ACTION.fullmatch(text)
    if match is None:
        raise ValueError(f"torch's schedule has an action {text!r} that is no F, B, I or W")
    return Action(int(match[1]), match[2], int(match[3]))


def simulate(orders: Sequence[Sequence[Action]], costs: Sequence[int]) -> Timeline:
    """When each action runs if a stage's forward takes `costs[stage]`, its whole backward twice that, and I and W once
    each. Raises ValueError for orders that wait for one another for ever."""
    ends: dict[Action, int] = {}
    ranks: list[list[Timed]] = [[] for _ in orders]
    progress = True
    while progress:
        progress = False
        for order, done in zip(orders, ranks, strict=True):
            while len(done) < len(order):
                action = order[len(done)]
                ready = _ready(action, ends, len(costs))
                if ready is None:
                    break
                start = max(ready, done[-1].end if done else 0)
                ends[action] = start + COSTS[action.kind] * costs[action.stage]
                done.append(Timed(action, start, ends[action]))
                progress = True
    waiting = [str(order[len(done)]) for order, done in zip(orders, ranks, strict=True) if len(done) < len(order)]
    if waiting:
        raise ValueError(f"these wait for one another for ever: {', '.join(waiting)}")
    return Timeline(tuple(map(tuple, ranks)))


def _ready(action: Action, ends: dict[Action, int], stages: int) -> int | None:
    """When what the action needs is there; None if it is not known yet."""
    stage, kind, microbatch = action
    if kind == "F":
        needs = [(stage - 1, "F")] if stage else []
    elif kind == "W":
        needs = [(stage, "I")]
    else:
        needs = [(stage, "F")]
        if stage + 1 < stages:
            needs.append((stage + 1, "I" if Action(stage + 1, "I", microbatch) in ends else "B"))
    times = [ends.get(Action(*need, microbatch)) for need in needs]
    return None if None in times else max((time for time in times if time is not None), default=0)
