"""What `inspect` shows of a spec's graphs: their canonical text after a pass, their sizes, or what a pass changed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from moegraph.cli.output import print_diff, print_json, print_table, say
from moegraph.compiled import Compiled
from moegraph.errors import UsageError
from moegraph.graph.diff import count_operators, diff_json, diff_lines, diff_programs, operators_text
from moegraph.graph.instances import blocks_text, expanded
from moegraph.graph.program import Instance, saved_bytes
from moegraph.graph.text import graph_json, graph_text
from moegraph.passes.balance_losses import BalanceLosses, definition
from moegraph.passes.pipeline import PassRecord
from moegraph.passes.split_pipeline import SplitPipeline, placement_text


@dataclass(frozen=True)
class Selection:
    """Which graphs are wanted: of which kind, name and stage, as full-named blocks or per kind, which lines."""

    kind: str | None = None
    graph: str | None = None
    expand: bool = False
    grep: str | None = None
    stage: int | None = None


@dataclass(frozen=True)
class View:
    """One graph to show. `block` is the kind, or with --expand the block's own name; `lines` those that were asked
    for, as (index in the graph, text)."""

    block: str
    kind: str
    instances: str
    graph: str
    module: fx.GraphModule
    lines: tuple[tuple[int, str], ...]

    @property
    def header(self) -> str:
        """`# moe / layer — layers.1 … layers.3`."""
        return f"# {self.block} / {self.graph} — {self.instances}"

    def to_json(self) -> dict[str, Any]:
        """The graph with the nodes whose lines were asked for, each with its line as `text`."""
        data = graph_json(self.module)
        nodes = [{**data["nodes"][index], "text": line} for index, line in self.lines]
        return {
            "block": self.block,
            "kind": self.kind,
            "instances": self.instances,
            "graph": self.graph,
            **data,
            "nodes": nodes,
        }


def print_graphs(compiled: Compiled, after: str | None, selection: Selection, *, as_json: bool) -> None:
    """The canonical text of the graphs after a pass."""
    record = _record(compiled, after, selection)
    views = list(_views(record, compiled, selection))
    shown = [view for view in views if view.lines]
    if as_json:
        print_json({"after": record.name, "level": record.level, "graphs": [view.to_json() for view in shown]})
        return
    for number, view in enumerate(shown):
        print(("\n" if number else "") + view.header)
        for _, line in view.lines:
            print(line)
    if not shown:
        say(f"no line of the graphs after {record.name} matches {selection.grep!r}")


def print_statistics(compiled: Compiled, after: str | None, selection: Selection, *, as_json: bool) -> None:
    """Sizes: nodes and operators per graph, and what it keeps for backward."""
    record = _record(compiled, after, selection)
    rows = []
    for view in _views(record, compiled, selection):
        operators = count_operators("\n".join(line for _, line in view.lines))
        rows.append((view, operators))
    if as_json:
        graphs = [
            {
                "block": v.block,
                "kind": v.kind,
                "instances": v.instances,
                "graph": v.graph,
                "nodes": o.total(),
                "operators": dict(o),
                "saved_bytes": saved_bytes(v.module),
            }
            for v, o in rows
        ]
        print_json({"after": record.name, "level": record.level, "graphs": graphs})
        return
    print(f"after {record.name} ({record.level} graphs)")
    table = [[v.block, v.graph, v.instances, o.total(), _mib(v.module), operators_text(o)] for v, o in rows]
    print_table(["block", "graph", "instances", ">nodes", ">saved MiB", "operators"], table)


def _mib(module: fx.GraphModule) -> str:
    size = saved_bytes(module)
    return f"{size / 2**20:.2f}" if size else "–"


def print_difference(compiled: Compiled, name: str, selection: Selection, *, full: bool, as_json: bool) -> None:
    """What a pass changed."""
    record = compiled.record(name)
    index = list(compiled.records).index(record)
    if index == 0:
        raise UsageError(f"{name!r} makes the first graphs, so there is nothing to compare: --after {name} prints them")
    before = compiled.records[index - 1]
    blocks = _blocks(compiled, selection)
    kinds = _kinds(record, selection, blocks)
    texts = [_only(each, selection.graph) for each in (before, record)]
    if selection.graph is not None and not any(graphs for text in texts for graphs in text.values()):
        raise UsageError(f"pass {name!r} has no graph {selection.graph!r}: {_graph_names(before, record)}")
    diffs = diff_programs(texts[0], texts[1], (before.name, record.name), kinds)
    titles = {kind: _title(blocks, kind) for kind in kinds}
    if as_json:
        print_json({**_about_json(record), "before": before.name, "kinds": diff_json(diffs, titles)})
        return
    print(_about(record))
    print()
    print_diff(diff_lines(diffs, titles, full=full))


def _about(record: PassRecord) -> str:
    """One line about a pass, and for the balance losses the formula that they stand for."""
    count = f"{record.count} nodes rewritten" if record.count != 1 else "1 node rewritten"
    line = f"{record.name}: {record.level} pass, {record.tier}, {count}"
    if record.made_by is None:
        line = f"{record.name}: every block is traced jointly with its backward"
    if isinstance(record.made_by, SplitPipeline) and record.count:
        moved = "1 block" if record.count == 1 else f"{record.count} blocks"
        line = f"{record.name}: {record.level} pass, {record.tier}, {moved} moved to another stage\n"
        line += placement_text(record.program.instances).replace("; ", "\n")
    if isinstance(record.made_by, BalanceLosses):
        line += "\n" + definition(record.program.spec).replace("; ", "\n")
    for note in dict.fromkeys(note for kind, note in record.notes.items() if note and not record.count):
        line += f"\n{note}"
    return line


def _about_json(record: PassRecord) -> dict[str, Any]:
    return {
        "pass": record.name,
        "level": record.level,
        "tier": record.tier,
        "rewritten": {kind: list(names) for kind, names in record.rewritten.items()},
        "notes": {kind: note for kind, note in record.notes.items() if note},
    }


def _record(compiled: Compiled, after: str | None, selection: Selection) -> PassRecord:
    """The record asked for; without a name the last layer pass, or the last pass that has the graph asked for."""
    if after is not None:
        record = compiled.record(after)
        if selection.graph is not None and not any(selection.graph in graphs for graphs in record.texts.values()):
            raise UsageError(f"there is no graph {selection.graph!r} after {after!r}: {_graph_names(record)}")
        return record
    for record in reversed(compiled.records):
        if selection.graph is None:
            if record.level == "layer":
                return record
        elif any(selection.graph in graphs for graphs in record.texts.values()):
            return record
    raise UsageError(f"no pass leaves a graph {selection.graph!r}: {_graph_names(*compiled.records)}")


def _graph_names(*records: PassRecord) -> str:
    names = dict.fromkeys(name for record in records for graphs in record.texts.values() for name in graphs)
    return "there are " + ", ".join(names)


def _blocks(compiled: Compiled, selection: Selection) -> Sequence[Instance]:
    """The blocks asked for: those of a stage of the finished program, or all."""
    instances = compiled.program.instances
    if selection.stage is None:
        return instances
    last = instances[-1].stage
    if not 0 <= selection.stage <= last:
        known = f"there are 0 to {last}" if last else "there is only stage 0"
        raise UsageError(f"there is no stage {selection.stage}: {known}")
    return [instance for instance in instances if instance.stage == selection.stage]


def _title(blocks: Sequence[Instance], kind: str) -> str:
    return blocks_text(instance for instance in blocks if instance.kind == kind)


def _kinds(record: PassRecord, selection: Selection, blocks: Sequence[Instance]) -> list[str]:
    there = [kind for kind in record.texts if any(instance.kind == kind for instance in blocks)]
    if selection.kind is None:
        return there
    if selection.kind not in there:
        where = "this spec" if selection.stage is None else f"stage {selection.stage}"
        raise UsageError(f"{where} has no block of kind {selection.kind!r}: there are {', '.join(there)}")
    return [selection.kind]


def _only(record: PassRecord, graph: str | None) -> dict[str, dict[str, str]]:
    return {
        kind: {name: text for name, text in graphs.items() if graph in (None, name)}
        for kind, graphs in record.texts.items()
    }


def _views(record: PassRecord, compiled: Compiled, selection: Selection) -> Iterator[View]:
    pattern = re.compile(selection.grep) if selection.grep is not None else None
    blocks = _blocks(compiled, selection)
    for kind in _kinds(record, selection, blocks):
        for name, text in record.texts[kind].items():
            if selection.graph not in (None, name):
                continue
            module = record.program.units[kind].graphs[name]
            view = View(kind, kind, _title(blocks, kind), name, module, ())
            if not selection.expand:
                yield _with_lines(view, text, pattern)
                continue
            for instance in (each for each in blocks if each.kind == kind):
                twin = expanded(module, instance)
                one = replace(view, block=instance.prefix, instances=kind, module=twin)
                yield _with_lines(one, graph_text(twin), pattern)


def _with_lines(view: View, text: str, pattern: re.Pattern[str] | None) -> View:
    lines = text.splitlines()
    kept = tuple((i, line) for i, line in enumerate(lines) if pattern is None or pattern.search(line))
    return replace(view, lines=kept)
