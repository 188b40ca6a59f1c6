"""What is proved about the collectives of each pipeline stage: that all ranks of a group issue the same sequence.

Every kind of block with collectives runs once more on a simulated group, and what each rank issued is held against the
order of its graphs. A stage issues what its blocks do, forward in order and backward in reverse; ranks of one group run
the same stages in the same order (`moegraph.graph.schedule`), so a whole step agrees where its blocks do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from moegraph.errors import CheckFailed
from moegraph.graph.collectives import Traffic, collectives, traffic
from moegraph.graph.instances import blocks_text
from moegraph.graph.placement import num_stages, rank_of_stage
from moegraph.graph.program import Instance, Program, Unit
from moegraph.verify.inputs import local_inputs, random_inputs
from moegraph.verify.run import STEP_GRAPHS, deterministic_threads, execute
from moegraph.verify.structure import no_host_sync
from moegraph.verify.world import World


@dataclass(frozen=True)
class StageProof:
    """The collectives of one stage over one group (none: `group` is empty), per micro-batch. `size` is how many ranks a
    group has, `host_waits` how often the host waits for sizes; `problem` says what does not hold."""

    stage: int
    ranks: tuple[int, ...]
    blocks: str
    group: str
    size: int
    forward: int
    backward: int
    host_waits: int
    problem: str | None = None

    @property
    def ok(self) -> bool:
        """Whether it holds."""
        return self.problem is None

    def to_json(self) -> dict[str, Any]:
        """As JSON-able values."""
        return {**asdict(self), "ranks": list(self.ranks), "ok": self.ok}

    def __str__(self) -> str:
        ranks = f"rank {self.ranks[0]}" if len(self.ranks) == 1 else f"ranks {self.ranks[0]}-{self.ranks[-1]}"
        head = f"stage {self.stage} on {ranks} ({self.blocks})"
        if self.problem is not None:
            return f"{head}: {self.problem}"
        waits = "no host synchronisation"
        if self.host_waits:
            waits = f"the host waits {self.host_waits} times, for the counts of transport exact"
        if not self.group:
            return f"{head}: no collectives, {waits}"
        number = f"{self.forward} collectives forward and {self.backward} backward per micro-batch"
        return f"{head}: group {self.group}, {number}, in one order on all {self.size} ranks; {waits}"


def prove_stages(program: Program, seed: int) -> list[StageProof]:
    """One proof per stage and group of a finished program."""
    with deterministic_threads():
        problems = {kind: _problem(program, unit, seed) for kind, unit in program.units.items()}
    proofs = []
    for stage in range(num_stages(program.spec.layout)):
        blocks = [instance for instance in program.instances if instance.stage == stage]
        for each in traffic(program, blocks) or [Traffic("", (), ())]:
            proofs.append(_proof(program, stage, blocks, each, problems))
    return proofs


def _proof(
    program: Program, stage: int, blocks: Sequence[Instance], found: Traffic, problems: dict[str, str | None]
) -> StageProof:
    layout = program.spec.layout
    first = rank_of_stage(layout, stage) * layout.dp
    problem = next((text for block in blocks if (text := problems[block.kind])), None)
    size = layout.ep if found.group else 1
    return StageProof(
        stage=stage,
        ranks=tuple(range(first, first + layout.dp)),
        blocks=blocks_text(blocks),
        group=found.group,
        size=size,
        forward=len(found.forward),
        backward=len(found.backward),
        host_waits=found.host_waits,
        problem=problem,
    )


def _problem(program: Program, unit: Unit, seed: int) -> str | None:
    """What does not hold of one kind of block, or None."""
    for name, module in unit.graphs.items():
        for sentence in no_host_sync(module):
            return f"{unit.kind}/{name}: {sentence}"
    wanted = _without_repeats(each.node for name in STEP_GRAPHS for each in collectives(unit.graphs[name]))
    if not wanted:
        return None
    size = program.spec.layout.ep
    whole = [random_inputs(program, unit.layer_graph, seed, rank) for rank in range(size)]
    world = World(size)
    try:
        world.run(lambda rank: execute(unit, local_inputs(whole[rank.index], unit, rank.index)))
    except CheckFailed as error:
        return f"{unit.kind}: {error}"
    for rank in world.ranks:
        if _without_repeats(call.node for call in rank.calls) != wanted:
            return f"{unit.kind}: rank {rank.index} issued other collectives than its graphs have"
    return None


def _without_repeats(names: Iterable[str]) -> list[str]:
    """A node that stands for several exchanges, one after the other, counts once."""
    return [name for name, _ in groupby(names)]
