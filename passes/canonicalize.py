"""canonicalize: dead code and no-ops go, repeated nodes become one.

    scaled = scale(lookup, 1.0)          ->  (uses of scaled read lookup)
    unused = linear(x, w)                ->  (gone, unless it has an effect)
    a = token_mask(d); b = token_mask(d) ->  a

Layer graphs only. Effectful nodes (collectives, mutation) are never removed and never merged, random ones never merged.
Where a rewrite would add up gradients in another order, so that they would be equal only nearly, it is left undone.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, fx

from moegraph import ops
from moegraph.graph.edit import Rewriter
from moegraph.graph.effects import eliminate_dead_code, is_effectful, is_random
from moegraph.graph.names import display_name
from moegraph.graph.program import Unit, ports
from moegraph.passes.contract import Level, Pass, PassContext, PassResult
from moegraph.passes.registry import registry
from moegraph.specs.schema import Spec


@registry.register
@dataclass(frozen=True)
class Canonicalize(Pass):
    """Removes dead code and no-ops and merges equal nodes."""

    name: ClassVar[str] = "canonicalize"
    level: ClassVar[Level] = "layer"
    provides: ClassVar[frozenset[str]] = frozenset({"canonical"})

    @classmethod
    def from_spec(cls, spec: Spec) -> Canonicalize | None:
        return cls() if spec.passes.canonicalize.enabled else None

    def apply(self, unit: Unit, context: PassContext) -> PassResult:
        rewriter = Rewriter(unit.graphs["layer"], self.name)
        carrying = _carrying_gradients(rewriter.module)
        for node in list(rewriter.graph.nodes):
            if _is_no_op(node, carrying):
                rewriter.replace(node, node.args[0])
        _merge_equal(rewriter, carrying)
        rewriter.rewritten += [display_name(node) for node in eliminate_dead_code(rewriter.graph)]
        if not rewriter.rewritten:
            return PassResult(unit, note="nothing dead, nothing repeated, no no-ops")
        return PassResult(unit.with_graphs({"layer": rewriter.finish()}), rewriter.rewritten)


def _carrying_gradients(module: fx.GraphModule) -> set[fx.Node]:
    """Nodes whose value depends on the hidden input or a trained parameter along floating-point values."""
    parameters, declared = module.meta["parameters"], ports(module, "inputs")
    hidden = {n for n, p in zip(module.graph.find_nodes(op="placeholder"), declared, strict=True) if p.name == "hidden"}
    found: set[fx.Node] = set()
    for node in module.graph.nodes:
        if node.op == "get_attr":
            carries = parameters[node.target].trained
        else:
            carries = node in hidden or (node.op == "call_function" and any(n in found for n in node.all_input_nodes))
        if carries and _is_float(node.meta["val"]):
            found.add(node)
    return found


def _is_float(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(map(_is_float, value))
    return isinstance(value, Tensor) and value.is_floating_point()


def _is_no_op(node: fx.Node, carrying: set[fx.Node]) -> bool:
    """A multiplication by one, unless taking it away would add up gradients in another order."""
    if node.op != "call_function" or node.target is not ops.scale or node.args[1] != 1.0:
        return False
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source not in carrying or len(source.users) == 1


def _merge_equal(rewriter: Rewriter, carrying: set[fx.Node]) -> None:
    """Nodes with the same operator and arguments become the first of them. Calls that carry gradients are left alone:
    two backwards summed are not bitwise one backward of the sum."""
    seen: dict[Any, fx.Node] = {}
    for node in list(rewriter.graph.nodes):
        if node.op not in ("call_function", "get_attr") or is_effectful(node) or is_random(node):
            continue
        if node in carrying and node.op == "call_function" and node.target is not operator.getitem:
            continue
        key = (node.op, node.target, _frozen(node.args), _frozen(node.kwargs))
        first = seen.setdefault(key, node)
        if first is not node:
            rewriter.replace(node, first)


def _frozen(argument: Any) -> Any:
    if isinstance(argument, dict):
        return tuple((k, _frozen(v)) for k, v in sorted(argument.items()))
    if isinstance(argument, (list, tuple)):
        return tuple(map(_frozen, argument))
    return argument if isinstance(argument, fx.Node) else (type(argument).__name__, repr(argument))
