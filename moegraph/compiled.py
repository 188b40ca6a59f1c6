"""`compile`: from a spec to graphs that are ready to run, with everything that happened on the way."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moegraph.errors import UsageError
from moegraph.graph.program import Program
from moegraph.lowering import lower
from moegraph.passes.pipeline import PassRecord, run_pipeline
from moegraph.runtime.parameter_groups import parameter_groups
from moegraph.specs.schema import Spec


@dataclass(frozen=True)
class Compiled:
    """A compiled spec: the program after the last pass and the record of each pass."""

    spec: Spec
    records: Sequence[PassRecord]

    @property
    def program(self) -> Program:
        """The program after the last pass."""
        return self.records[-1].program

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


def compile(spec: Spec, rank: int = 0, world: int = 1, progress: Callable[[str], None] | None = None) -> Compiled:
    """Lowers a spec and runs its passes, on the CPU and without touching a device.

    `rank` of `world` is whose graphs are wanted. Until the parallel layouts exist every rank's graphs are those of the
    undistributed model, and a world above 1 is refused. Raises SpecError for a rule of `train.optimizer.groups` that
    matches no parameter of the model.
    """
    if world != 1 or rank != 0:
        raise UsageError(f"rank {rank} of world {world}: graphs of several ranks wait for the parallel layouts")
    started = time.perf_counter()
    program, optimizer = lower(spec), spec.train.optimizer
    seconds = time.perf_counter() - started
    parameter_groups(program.parameters, optimizer.groups, optimizer.weight_decay)  # before minutes of work
    return Compiled(spec, run_pipeline(program, progress=progress, lowering_seconds=seconds))
