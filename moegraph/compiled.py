"""`compile`: from a spec to graphs that are ready to run, with everything that happened on the way."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moegraph.errors import UsageError
from moegraph.graph.placement import num_stages, stages_of_rank
from moegraph.graph.program import Instance, Program
from moegraph.lowering import lower
from moegraph.passes.pipeline import PassRecord, run_pipeline
from moegraph.runtime.parameter_groups import parameter_groups
from moegraph.specs.schema import Spec


@dataclass(frozen=True)
class Compiled:
    """A compiled spec: the program after the last pass and the record of each pass. `rank` is whose part of it is
    wanted, None for all of it; records and hashes are those of the whole program either way."""

    spec: Spec
    records: Sequence[PassRecord]
    rank: int | None = None

    @property
    def program(self) -> Program:
        """The program after the last pass."""
        return self.records[-1].program

    @property
    def stages(self) -> tuple[int, ...]:
        """The pipeline stages that the rank runs; all of them without a rank."""
        layout = self.spec.layout
        if self.rank is None:
            return tuple(range(num_stages(layout)))
        return stages_of_rank(layout, self.rank // layout.dp)

    @property
    def instances(self) -> tuple[Instance, ...]:
        """The blocks of these stages."""
        return tuple(instance for instance in self.program.instances if instance.stage in self.stages)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of these blocks, in the order of the program."""
        used = {instance.kind for instance in self.instances}
        return tuple(kind for kind in self.program.units if kind in used)

    @property
    def whole(self) -> bool:
        """Whether every rank's graphs are in it."""
        return self.rank is None or self.spec.layout.world == 1

    def record(self, name: str) -> PassRecord:
        """The record of a pass by name; `lower` and `trace` are records too."""
        for record in self.records:
            if record.name == name:
                return record
        known = ", ".join(record.name for record in self.records)
        raise UsageError(f"no pass {name!r} ran; these did: {known}")

    @property
    def hashes(self) -> dict[str, str]:
        """SHA-256 of all graph texts after each pass, in order."""
        return {record.name: record.hash for record in self.records}


def compile(spec: Spec, *, rank: int | None = None, progress: Callable[[str], None] | None = None) -> Compiled:
    """Lowers a spec and runs its passes, on the CPU and without touching a device.

    `rank` is the rank of the spec's layout whose stages are wanted. Raises UsageError for a rank that the layout has
    not, and SpecError for a rule of `train.optimizer.groups` that matches no parameter of the model.
    """
    if rank is not None and not 0 <= rank < spec.layout.world:
        world = spec.layout.world
        valid = f"0 to {world - 1}" if world > 1 else "0"
        raise UsageError(f"there is no rank {rank}: the layout has {world} (dp × pp); valid: {valid}")
    started = time.perf_counter()
    program, optimizer = lower(spec), spec.train.optimizer
    seconds = time.perf_counter() - started
    parameter_groups(program.parameters, optimizer.groups, optimizer.weight_decay)  # before minutes of work
    return Compiled(spec, run_pipeline(program, progress=progress, lowering_seconds=seconds), rank)
