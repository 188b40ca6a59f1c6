"""split-pipeline: every block gets the pipeline stage that it belongs to.

    embedding   layers.0   layers.1   layers.2   layers.3   head
      =>
    embedding   layers.0   layers.1 | layers.2   layers.3   head        pp 2: stage 0 | stage 1

Graphs stay as they are: a stage runs the graphs of its blocks. The cut is `layout.stages`, or the one whose largest
stage costs least (`moegraph.graph.stages`); `layout.schedule` says how many stages a rank has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from moegraph.graph.instances import blocks_text
from moegraph.graph.program import Instance, Program, Unit
from moegraph.graph.stages import assign_stages
from moegraph.passes.contract import Level, Pass, PassContext, PassResult
from moegraph.passes.registry import registry
from moegraph.specs.schema import Spec


@registry.register
@dataclass(frozen=True)
class SplitPipeline(Pass):
    """Sets the stage of each instance. `rewritten` names the blocks that move, notes say where each block is."""

    name: ClassVar[str] = "split-pipeline"
    level: ClassVar[Level] = "layer"
    provides: ClassVar[frozenset[str]] = frozenset({"stages"})

    @classmethod
    def from_spec(cls, spec: Spec) -> SplitPipeline:
        return cls()

    def place(self, program: Program) -> tuple[Instance, ...]:
        return program.instances if program.spec.layout.pp == 1 else assign_stages(program)

    def apply(self, unit: Unit, context: PassContext) -> PassResult:
        program = context.program
        if program.spec.layout.pp == 1:
            return PassResult(unit, note="pp 1: one stage")
        pairs = [pair for pair in zip(program.instances, self.place(program), strict=True) if pair[0].kind == unit.kind]
        moved = [now.prefix for was, now in pairs if was.stage != now.stage]
        return PassResult(unit, moved, placement_text([now for _, now in pairs]))


def placement_text(instances: Sequence[Instance]) -> str:
    """`stage 0: layers.0; stage 1: layers.1 … layers.3`."""
    stages = dict.fromkeys(instance.stage for instance in instances)
    return "; ".join(f"stage {stage}: {blocks_text(i for i in instances if i.stage == stage)}" for stage in stages)
