"""overlap-communication: work that does not need what is under way runs between a collective's start and its wait.

    s = all_to_all(rows)                s = all_to_all(rows)
    r = wait(s)                    =>   shared expert, or weight gradients: nothing of them needs r
    … experts of r …                    r = wait(s)
    shared expert                       … experts of r …

Moved are the shared experts' nodes, which come later in the forward and earlier in the backward, and weight gradients,
which nothing waits for. Where `chunk-experts` cut the tokens into runs, these take turns: while the experts work on
one, the next is on its way to them and the one before on its way back.

    start 0, start 1 | wait 0, experts 0, return 0 | wait 1, experts 1, return 1 | wait for 0, wait for 1

Only the order of nodes changes, so every number stays what it was. Ranks have one graph, so the order of collectives is
the same on all. It is kept by eager graphs and by Inductor, which schedules in the order given where nothing else
decides.

On a GPU the collective runs on a stream of its own group; it also takes multiprocessors and bandwidth from what runs
beside it, so this is off unless the spec says `on`, or says `auto` and a measurement at the start of the run found it
faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from moegraph import ops
from moegraph.graph.edit import Rewriter
from moegraph.graph.names import display_name, facts
from moegraph.graph.program import Unit
from moegraph.passes.chunk_experts import chunk_of
from moegraph.passes.contract import Level, Pass, PassContext, PassResult
from moegraph.passes.registry import registry
from moegraph.specs.schema import Spec

_WAIT = torch.ops._c10d_functional.wait_tensor.default
_SHARED = "shared."
_LATE = ops.WEIGHT_GRADIENTS | {torch.ops.moegraph.mx_decode.default}  # and what makes rows for them of a payload


@registry.register
@dataclass(frozen=True)
class OverlapCommunication(Pass):
    """Moves independent work between the start and the wait of each exchange of rows."""

    name: ClassVar[str] = "overlap-communication"
    level: ClassVar[Level] = "step"
    requires: ClassVar[frozenset[str]] = frozenset({"joint"})

    @classmethod
    def from_spec(cls, spec: Spec) -> OverlapCommunication | None:
        # `auto` is decided by the run: it compiles the spec with `on` too, and measures both.
        return cls() if spec.passes.overlap_communication.mode == "on" else None

    def apply(self, unit: Unit, context: PassContext) -> PassResult:
        rewriter = Rewriter(unit.graphs["joint"], self.name)
        pairs = _exchanges(rewriter.graph)
        if not pairs:
            return PassResult(unit, note="nothing is exchanged in this block, or start and wait are one operator")
        moved = [name for direction in ("forward", "backward") for name in _take_turns(rewriter, direction)]
        for start, wait in pairs:
            moved += _fill(rewriter, start, wait)
        if not moved:
            return PassResult(unit, note="nothing here is independent of what is exchanged")
        return PassResult(unit.with_graphs({"joint": rewriter.finish()}), moved)


def _exchanges(graph: fx.Graph) -> list[tuple[fx.Node, fx.Node]]:
    """(start, wait) of each exchange of rows, floating-point or payloads of bytes, in order."""
    found = []
    for wait in graph.nodes:
        if wait.op == "call_function" and wait.target is _WAIT and _has_rows(wait.meta["val"]):
            start = wait.args[0]
            if isinstance(start, fx.Node):
                found.append((start, wait))
    return found


def _has_rows(value: torch.Tensor) -> bool:
    """Not router weights, which are a column, nor counts."""
    return value.shape[-1] > 1 and (value.is_floating_point() or value.dtype == torch.uint8)


def _take_turns(rewriter: Rewriter, direction: str) -> list[str]:
    """Lets the runs of tokens take turns between exchanges; returns the names of the nodes that moved.

    A node's turn is how many waits it depends on and, among those with as many, the run it works on, in the order of
    the graph. Weight gradients come after all runs, and so does what depends on no run.
    """
    nodes = list(rewriter.graph.nodes)
    runs = {node: _run_of(node) for node in nodes if facts(node).get("direction") == direction}
    places = [place for place, node in enumerate(nodes) if runs.get(node) is not None]
    if not places:
        return []
    window, behind = nodes[places[0] : places[-1] + 1], nodes[places[-1] + 1]
    ranks = {run: rank for rank, run in enumerate(dict.fromkeys(runs.get(node) for node in window))}
    depth: dict[fx.Node, int] = {}
    for node in window:
        before = max((depth.get(argument, 0) for argument in node.all_input_nodes), default=0)
        depth[node] = before + (node.target is _WAIT)
    first = {a for node in window if runs.get(node) is not None and not depth[node] for a in _needed(node)}
    turns: dict[fx.Node, tuple[int, int]] = {}
    for node in window:
        run = runs.get(node)
        own = len(ranks) if run is None or node.target in ops.WEIGHT_GRADIENTS else ranks[run]
        if run is None and node in first:
            own = -1
        turns[node] = max([(depth[node], own), *(turns[a] for a in node.all_input_nodes if a in turns)])
    ordered = sorted(window, key=lambda node: turns[node])
    for node in ordered:
        behind.prepend(node)
    return [display_name(node) for node, other in zip(window, ordered, strict=True) if node is not other]


def _run_of(node: fx.Node) -> int | None:
    """The run of tokens that a call of a step graph works on."""
    return chunk_of(str(facts(node).get("layer", ""))) if node.op == "call_function" else None


def _fill(rewriter: Rewriter, start: fx.Node, wait: fx.Node) -> list[str]:
    """Moves what may run before `wait` to just before it; returns the names of what was moved."""
    order = {node: place for place, node in enumerate(rewriter.graph.nodes)}
    moved: list[str] = []
    late = _depending(wait)
    for node in [n for n in rewriter.graph.nodes if order[n] > order[wait]]:
        if _is_shared(node, wait) and node not in late and all(_before(n, wait, order) for n in node.all_input_nodes):
            wait.prepend(node)
            order[node] = order[start]  # it is before the wait now, and may be read by what follows it there
            facts(node)["overlaps"] = display_name(start)
            moved.append(display_name(node))
    needed, output = _needed(start), rewriter.output_node()
    for node in reversed([n for n in rewriter.graph.nodes if order[n] < order[start]]):
        movable = node.target in _LATE or _is_shared(node, wait)
        waited_for = node in needed or any(user is not output and order[user] < order[start] for user in node.users)
        if movable and not waited_for and "overlaps" not in facts(node):
            start.append(node)
            order[node] = order[wait]  # behind the start
            facts(node)["overlaps"] = display_name(start)
            moved.append(display_name(node))
    return moved


def _is_shared(node: fx.Node, wait: fx.Node) -> bool:
    """A node of the shared experts in the same direction as the exchange."""
    known = facts(node)
    same = known.get("direction") == facts(wait).get("direction")
    return node.op == "call_function" and same and str(known.get("layer", "")).startswith(_SHARED)


def _before(node: fx.Node, wait: fx.Node, order: dict[fx.Node, int]) -> bool:
    return node.op in ("placeholder", "get_attr") or order[node] < order[wait]


def _depending(root: fx.Node) -> set[fx.Node]:
    """What depends on a node."""
    return _reached(root, lambda node: node.users)


def _needed(root: fx.Node) -> set[fx.Node]:
    """What a node depends on."""
    return _reached(root, lambda node: node.all_input_nodes)


def _reached(root: fx.Node, onwards: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    stack = [root]
    while stack:
        new = [node for node in onwards(stack.pop()) if node not in found]
        found.update(new)
        stack += new
    return found
