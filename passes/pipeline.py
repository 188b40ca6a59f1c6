"""The pipeline: contracts are checked, passes run in order, and after each everything is checked and recorded.

    lower -> layer passes -> trace -> step passes -> split-backward

After every pass each graph is linted, its values are propagated again and compared, the structural verifiers run, and
a record is kept: seconds, nodes rewritten, the canonical text of every graph, and the stage of every block. `lower` and
`trace` are records too, so the list reads from the spec to the graphs that torch.compile gets.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from moegraph.errors import CheckFailed, MoegraphError, RunError
from moegraph.graph.program import Program, Unit
from moegraph.graph.propagate import Propagator
from moegraph.graph.stages import check_placement
from moegraph.graph.text import graph_text, text_hash
from moegraph.passes.contract import Pass, PassContext, PassResult
from moegraph.passes.selection import TRACE, order_passes, passes_for
from moegraph.step.joint import trace_joint
from moegraph.verify.structure import check_rewrite, check_unit

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class PassRecord:
    """What one pass did. `texts` maps kind → graph name → canonical text after the pass."""

    name: str
    level: str
    tier: str
    seconds: float
    rewritten: Mapping[str, Sequence[str]]
    notes: Mapping[str, str]
    texts: Mapping[str, Mapping[str, str]]
    program: Program = field(repr=False)
    made_by: Pass | None = None

    @property
    def placement(self) -> Mapping[str, int]:
        """The stage of each block, by the block's name."""
        return {instance.prefix: instance.stage for instance in self.program.instances}

    @property
    def hash(self) -> str:
        """SHA-256 over every graph's text and, where there are several stages, over the placement."""
        parts = [f"{kind}/{name}\n{text}" for kind, graphs in self.texts.items() for name, text in graphs.items()]
        if any(self.placement.values()):
            parts += [f"{prefix} {stage}" for prefix, stage in self.placement.items()]
        return text_hash("\n".join(parts))

    @property
    def count(self) -> int:
        """Nodes rewritten, over all kinds."""
        return sum(map(len, self.rewritten.values()))


def run_pipeline(
    program: Program,
    passes: Sequence[Pass] | None = None,
    progress: Callable[[str], None] | None = None,
    lowering_seconds: float = 0.0,
) -> list[PassRecord]:
    """Runs the passes over a lowered program; the last record holds the finished program, and the first one says that
    lowering took `lowering_seconds`.

    Raises `CheckFailed` naming the pass, the kind of block and the node when a graph does not hold, and `RunError` when
    a pass itself fails.
    """
    passes = passes_for(program.spec) if passes is None else passes
    report = progress or (lambda name: None)
    pipeline = _Pipeline()
    pipeline.record("lower", "layer", program, lowering_seconds)
    for p in (p for p in passes if p.level == "layer"):
        report(p.name)
        pipeline.apply(p)
    report(TRACE)
    pipeline.trace()
    for p in (p for p in passes if p.level == "step"):
        report(p.name)
        pipeline.apply(p)
    return pipeline.records


class _Pipeline:
    """The records so far, and the checks that each new one has to pass."""

    def __init__(self) -> None:
        self.records: list[PassRecord] = []
        self._propagator = Propagator()

    @property
    def program(self) -> Program:
        return self.records[-1].program

    def trace(self) -> None:
        """From layer graphs to joint graphs."""
        started = time.perf_counter()
        traced = {
            kind: replace(unit, graphs={"joint": trace_joint(unit.graphs["layer"])}, layer=unit.graphs["layer"])
            for kind, unit in self.program.units.items()
        }
        self.record(TRACE, "step", self.program.with_units(traced), time.perf_counter() - started)

    def apply(self, p: Pass) -> None:
        """One pass over every kind of block."""
        context, units = PassContext(self.program), {}
        rewritten: dict[str, Sequence[str]] = {}
        notes: dict[str, str] = {}
        started = time.perf_counter()
        for kind, unit in self.program.units.items():
            result = _run(p, kind, PassResult, p.apply, unit, context)
            units[kind] = result.unit
            rewritten[kind] = tuple(result.rewritten)
            notes[kind] = result.note
        instances = _run(p, "the blocks", tuple, p.place, self.program)
        seconds = time.perf_counter() - started
        for kind, unit in self.program.units.items():
            if _texts(unit) != self.records[-1].texts[kind]:
                raise CheckFailed(
                    f"pass {p.name!r} changed the graph of {kind} that it was given, so that nothing could be "
                    "compared: edit a copy (moegraph.graph.edit.Rewriter)"
                )
            check_rewrite(unit, units[kind], p.name)
        check_placement(self.program.instances, instances, p.name)
        program = replace(self.program, instances=instances).with_units(units)
        self.record(p.name, p.level, program, seconds, p, rewritten, notes)

    def record(
        self,
        name: str,
        level: str,
        program: Program,
        seconds: float = 0.0,
        p: Pass | None = None,
        rewritten: Mapping[str, Sequence[str]] | None = None,
        notes: Mapping[str, str] | None = None,
    ) -> None:
        """Checks the program and adds its record. A graph that the pass handed on as it was is neither checked nor
        written again."""
        before = self.program.units if self.records else {}
        texts: dict[str, dict[str, str]] = {}
        for kind, unit in program.units.items():
            known = before[kind].graphs if kind in before else {}
            same = {n for n, module in unit.graphs.items() if known.get(n) is module}
            check_unit(unit, name, same, self._propagator)
            texts[kind] = {
                n: self.records[-1].texts[kind][n] if n in same else graph_text(module)
                for n, module in unit.graphs.items()
            }
        tier = p.tier if p is not None else "exact"
        self.records.append(PassRecord(name, level, tier, seconds, rewritten or {}, notes or {}, texts, program, p))


def _run(p: Pass, what: str, answer: type[Answer], method: Callable[..., Answer], *given: Any) -> Answer:
    """What a method of a pass answers. `what` names the kind of block, or what else it was called for."""
    try:
        result = method(*given)
    except MoegraphError:
        raise
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        raise RunError(
            f"pass {p.name!r} fails on {what}: {type(error).__name__}: {error} ({where.filename}:{where.lineno})"
        ) from error
    if not isinstance(result, answer):
        raise RunError(f"pass {p.name!r} returned {type(result).__name__} for {what}, not a {answer.__name__}")
    return result


def _texts(unit: Unit) -> dict[str, str]:
    return {name: graph_text(module) for name, module in unit.graphs.items()}


__all__ = ["TRACE", "PassRecord", "order_passes", "passes_for", "run_pipeline"]
