"""The pipeline: contracts are checked, passes run in order, and after each everything is checked and recorded.

    lower -> layer passes -> trace -> step passes -> split-backward

After every pass each graph is linted, its values are propagated again and compared, the structural verifiers run, and
a record is kept: seconds, nodes rewritten, and the canonical text of every graph. `lower` and `trace` are records too,
so the list reads from the spec to the graphs that torch.compile gets.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import networkx as nx

from moegraph.errors import UsageError
from moegraph.graph.program import Program, Unit
from moegraph.graph.propagate import propagate
from moegraph.graph.text import graph_text, text_hash
from moegraph.passes.contract import Pass, PassContext
from moegraph.passes.registry import registry
from moegraph.specs.schema import Spec
from moegraph.step.joint import trace_joint
from moegraph.verify.structure import check_unit

TRACE = "trace"


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
    def hash(self) -> str:
        """SHA-256 over every graph's text."""
        joined = "\n".join(
            f"{kind}/{name}\n{text}" for kind, graphs in self.texts.items() for name, text in graphs.items()
        )
        return text_hash(joined)

    @property
    def count(self) -> int:
        """Nodes rewritten, over all kinds."""
        return sum(map(len, self.rewritten.values()))


def passes_for(spec: Spec) -> list[Pass]:
    """The passes the spec asks for, configured and in an order that honours every contract."""
    _check_custom(spec)
    enabled = [p for p in (pass_class.from_spec(spec) for pass_class in registry) if p is not None]
    enabled = [p for p in enabled if _custom_enabled(spec, p)]
    return order_passes(enabled, _explicit_after(spec))


def order_passes(passes: Sequence[Pass], after: Mapping[str, str] | None = None) -> list[Pass]:
    """Passes sorted so that layer passes come first, `requires` are met and `after` holds; registration order breaks
    ties. Raises `UsageError` naming the pass and what it lacks, or the cycle."""
    by_name = {p.name: p for p in passes}
    if len(by_name) != len(passes):
        raise UsageError("a pass is listed twice")
    graph = nx.DiGraph()
    graph.add_nodes_from(by_name)
    built_in = {"joint": TRACE}
    for p in passes:
        for other in passes:
            if p.level == "layer" and other.level == "step":
                graph.add_edge(p.name, other.name)
            if other.provides & p.requires:
                graph.add_edge(other.name, p.name)
            if other.provides & p.conflicts:
                graph.add_edge(p.name, other.name)
        provided = frozenset(built_in).union(*(other.provides for other in passes))
        if missing := p.requires - provided:
            raise UsageError(f"pass {p.name!r} requires {', '.join(sorted(missing))}, which no enabled pass provides")
    for name, before in (after or {}).items():
        if before not in by_name:
            raise UsageError(f"pass {name!r} is to run after {before!r}, which is not enabled")
        graph.add_edge(before, name)
    rank = {p.name: i for i, p in enumerate(passes)}
    try:
        names = list(nx.lexicographical_topological_sort(graph, key=rank.__getitem__))
    except nx.NetworkXUnfeasible:
        cycle = " -> ".join(edge[0] for edge in nx.find_cycle(graph))
        raise UsageError(f"the passes' contracts contradict each other: {cycle}") from None
    return [by_name[name] for name in names]


def run_pipeline(
    program: Program, passes: Sequence[Pass] | None = None, progress: Callable[[str], None] | None = None
) -> list[PassRecord]:
    """Runs the passes over a lowered program; the last record holds the finished program."""
    passes = passes_for(program.spec) if passes is None else passes
    report = progress or (lambda name: None)
    records = [_record("lower", "layer", program, 0.0)]
    for p in (p for p in passes if p.level == "layer"):
        report(p.name)
        records.append(_apply(p, records[-1].program))
    report(TRACE)
    started = time.perf_counter()
    traced = {
        kind: replace(unit, graphs={"joint": trace_joint(unit.graphs["layer"])}, layer=unit.graphs["layer"])
        for kind, unit in records[-1].program.units.items()
    }
    records.append(_record(TRACE, "step", records[-1].program.with_units(traced), time.perf_counter() - started))
    for p in (p for p in passes if p.level == "step"):
        report(p.name)
        records.append(_apply(p, records[-1].program))
    return records


def _apply(p: Pass, program: Program) -> PassRecord:
    context, units = PassContext(program), {}
    rewritten: dict[str, Sequence[str]] = {}
    notes: dict[str, str] = {}
    started = time.perf_counter()
    for kind, unit in program.units.items():
        result = p.apply(unit, context)
        units[kind] = result.unit
        rewritten[kind] = tuple(result.rewritten)
        notes[kind] = result.note
    seconds = time.perf_counter() - started
    return _record(p.name, p.level, program.with_units(units), seconds, p, rewritten, notes)


def _record(
    name: str,
    level: str,
    program: Program,
    seconds: float,
    p: Pass | None = None,
    rewritten: Mapping[str, Sequence[str]] | None = None,
    notes: Mapping[str, str] | None = None,
) -> PassRecord:
    for unit in program.units.values():
        for module in unit.graphs.values():
            propagate(module, name)
        check_unit(unit, name)
    texts = {kind: _texts(unit) for kind, unit in program.units.items()}
    tier = p.tier if p is not None else "exact"
    return PassRecord(name, level, tier, seconds, rewritten or {}, notes or {}, texts, program, p)


def _texts(unit: Unit) -> dict[str, str]:
    return {name: graph_text(module) for name, module in unit.graphs.items()}


def _check_custom(spec: Spec) -> None:
    for name in spec.passes.custom:
        if name not in registry:
            known = ", ".join(registry.names())
            raise UsageError(f"passes.custom.{name}: no such pass is registered (known: {known}); load its file with --pass-file")


def _custom_enabled(spec: Spec, p: Pass) -> bool:
    options = spec.passes.custom.get(p.name)
    return options is None or options.enabled


def _explicit_after(spec: Spec) -> dict[str, str]:
    return {name: o.after for name, o in spec.passes.custom.items() if o.enabled and o.after is not None}
