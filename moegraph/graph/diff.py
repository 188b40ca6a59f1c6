"""What a pass changed, as text: a unified diff per graph, and what was added and removed per operator.

Works on the canonical texts (`moegraph.graph.text`), so whatever two graphs print, it compares. Two liberties make it
readable: the line of results is taken apart, one result per line, and a kind whose graphs are other ones afterwards
(`trace`, `split-backward`) is told in sizes rather than in thousands of lines.

    --- moe/layer after canonicalize
    +++ moe/layer after balance-losses
    @@ -56,3 +56,7 @@
     moe.residual: f32[4096, 128] = add(attention.residual, moe.sum, alpha=1.0)  # lower
    +moe.z_loss: f32[] = z_loss(moe.router, token_mask)  # balance-losses
     return hidden hidden = moe.residual
    +return auxiliary z = moe.z_loss
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Texts = Mapping[str, Mapping[str, str]]  # kind → graph name → canonical text

_CONTEXT = 3
_RETURN = "return "
_CALL = re.compile(r"[^:]+: .+? = ([\w.]+)\(")


@dataclass(frozen=True)
class GraphDiff:
    """One graph before and after. `lines` is the unified diff, empty where nothing changed; `added` and `removed`
    count nodes by operator (`input`, `parameter`, `result` for those that call none)."""

    graph: str
    lines: tuple[str, ...]
    added: Mapping[str, int]
    removed: Mapping[str, int]


@dataclass(frozen=True)
class KindDiff:
    """One kind of block before and after. Sizes are nodes per graph, results not counted."""

    kind: str
    graphs: tuple[GraphDiff, ...]
    sizes_before: Mapping[str, int]
    sizes_after: Mapping[str, int]
    operators_after: Mapping[str, Mapping[str, int]]

    @property
    def restructured(self) -> bool:
        """Whether the kind has other graphs than before, rather than the same ones changed."""
        return set(self.sizes_before) != set(self.sizes_after)

    @property
    def changed(self) -> bool:
        """Whether anything differs."""
        return any(graph.lines for graph in self.graphs)


def operator_of(line: str) -> str:
    """The operator of a line of canonical text."""
    if line.startswith(_RETURN):
        return "result"
    call = _CALL.match(line)
    if call is not None:
        return call[1]
    right = line.partition(" = ")[2].partition("  # ")[0]
    return right if right in ("input", "parameter") else "getitem"


def count_operators(text: str) -> Counter[str]:
    """Nodes by operator, without the results."""
    return Counter(operator_of(line) for line in text.splitlines() if not line.startswith(_RETURN))


def diff_programs(
    before: Texts, after: Texts, names: tuple[str, str], kinds: Sequence[str] | None = None
) -> list[KindDiff]:
    """The difference of each kind; `names` are the passes after which the texts were taken."""
    chosen = list(dict.fromkeys([*before, *after])) if kinds is None else kinds
    return [_diff_kind(kind, before.get(kind, {}), after.get(kind, {}), names) for kind in chosen]


def diff_lines(diffs: Sequence[KindDiff], titles: Mapping[str, str], *, full: bool = False) -> Iterator[str]:
    """The differences for people. `titles` names each kind's instances; `full` prints every line of kinds whose graphs
    are new. Ends with one line per changed kind saying what came and went, and one that names the unchanged kinds."""
    for diff in diffs:
        if not diff.changed:
            continue
        yield f"{diff.kind} — {titles[diff.kind]}"
        if diff.restructured and not full:
            yield from _sizes(diff)
        else:
            for graph in diff.graphs:
                yield from graph.lines
        yield ""
    for diff in diffs:
        if diff.changed and not diff.restructured:
            yield f"{diff.kind}: {_summary(diff)}"
    unchanged = [diff.kind for diff in diffs if not diff.changed]
    if unchanged:
        yield f"unchanged: {', '.join(unchanged)}"


def diff_json(diffs: Sequence[KindDiff], titles: Mapping[str, str]) -> list[dict[str, Any]]:
    """The differences for machines."""
    return [
        {
            "kind": diff.kind,
            "instances": titles[diff.kind],
            "changed": diff.changed,
            "restructured": diff.restructured,
            "nodes_before": dict(diff.sizes_before),
            "nodes_after": dict(diff.sizes_after),
            "graphs": {
                graph.graph: {"added": dict(graph.added), "removed": dict(graph.removed), "diff": list(graph.lines)}
                for graph in diff.graphs
                if graph.lines
            },
        }
        for diff in diffs
    ]


def _diff_kind(kind: str, before: Mapping[str, str], after: Mapping[str, str], names: tuple[str, str]) -> KindDiff:
    graphs = []
    for name in dict.fromkeys([*before, *after]):
        old, new = _lines(before.get(name, "")), _lines(after.get(name, ""))
        labels = (f"{kind}/{name} after {names[0]}", f"{kind}/{name} after {names[1]}")
        lines = difflib.unified_diff(old, new, *labels, n=_CONTEXT, lineterm="") if old != new else ()
        was, now = Counter(map(operator_of, old)), Counter(map(operator_of, new))
        graphs.append(GraphDiff(name, tuple(lines), now - was, was - now))
    operators = {name: count_operators(text) for name, text in after.items()}
    sizes = {name: count_operators(text).total() for name, text in before.items()}
    return KindDiff(kind, tuple(graphs), sizes, {name: ops.total() for name, ops in operators.items()}, operators)


def _lines(text: str) -> list[str]:
    """The lines of a text, with each result on a line of its own."""
    lines = []
    for line in text.splitlines():
        if line.startswith(_RETURN):
            lines += [f"{_RETURN}{result}" for result in line.removeprefix(_RETURN).split(", ")]
        else:
            lines.append(line)
    return lines


def _sizes(diff: KindDiff) -> Iterator[str]:
    before = ", ".join(f"{name} {size}" for name, size in diff.sizes_before.items())
    after = ", ".join(f"{name} {size}" for name, size in diff.sizes_after.items())
    yield f"  nodes: {before} → {after}"
    for name, operators in diff.operators_after.items():
        yield f"  {name}: {operators_text(operators)}"


def operators_text(operators: Mapping[str, int], most: int = 8) -> str:
    """`24 aten.mul, 12 aten.add, … 9 more operators`: the most frequent first."""
    ordered = sorted(operators.items(), key=lambda item: (-item[1], item[0]))
    parts = [f"{count} {name}" for name, count in ordered[:most]]
    left = len(ordered) - most
    return (", ".join(parts) or "nothing") + (f", … {left} more operators" if left > 0 else "")


def _summary(diff: KindDiff) -> str:
    parts = []
    for graph in diff.graphs:
        changes = [f"+{count} {name}" for name, count in sorted(graph.added.items())]
        changes += [f"-{count} {name}" for name, count in sorted(graph.removed.items())]
        if graph.lines:
            where = f"{graph.graph} " if len(diff.graphs) > 1 else ""
            parts.append(where + (", ".join(changes) or "the same operators, otherwise connected or named"))
    return "; ".join(parts)
