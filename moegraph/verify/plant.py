"""Planting a fault: one value of a graph is made wrong, to show that the comparison would see it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx

from moegraph import ops
from moegraph.graph.edit import Rewriter
from moegraph.graph.names import display_name, facts
from moegraph.graph.program import Unit, ports, results


def plant_fault(
    unit: Unit, rewritten: Sequence[str], graph: str | None = None, factor: float = 1.0625
) -> tuple[Unit, str] | None:
    """The unit with one float value scaled by `factor`, and that node's name; None when no node qualifies.

    The value is one that the pass touched where there is one, else the last that reaches a compared output; it is in
    the named graph, by default the one that holds gradients.
    """
    name = graph or next(n for n in ("backward", "joint", "layer") if n in unit.graphs)
    module = unit.graphs[name]
    target = _choose(module, set(rewritten))
    if target is None:
        return None
    rewriter = Rewriter(module, "planted fault")
    node = next(n for n in rewriter.graph.nodes if display_name(n) == target)
    users, before = list(node.users), node.next
    if node.meta["val"].numel() == 0:  # its result says only that it is done: what it adds to a buffer is made wrong
        users, before = [node], node
        node = next(a for a in reversed(node.all_input_nodes) if a is not node.args[0] and _is_float(a))
    operator = ops.scale if name == "layer" else torch.ops.aten.mul.Tensor
    wrong = rewriter.call_before(before, f"{target}.wrong", operator, node, factor)
    facts(wrong).update(layer=target, direction=facts(node).get("direction", "forward"))
    for user in users:
        user.replace_input_with(node, wrong)
    return unit.with_graphs({**unit.graphs, name: rewriter.finish()}), target


def _choose(module: fx.GraphModule, rewritten: set[str]) -> str | None:
    reaching = _reaching(module)
    candidates = [n for n in module.graph.nodes if n.op == "call_function" and n in reaching and _is_float(n)]
    touched = [n for n in candidates if display_name(n) in rewritten]
    chosen = touched or candidates
    return display_name(chosen[-1]) if chosen else None


def _is_float(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_floating_point() and value.element_size() > 1


def _reaching(module: fx.GraphModule) -> set[fx.Node]:
    """Nodes that an output depends on."""
    found: set[fx.Node] = set()
    named = zip(ports(module, "outputs"), results(module), strict=True)
    stack = [node for port, node in named if port.role != "metric"]
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return found
