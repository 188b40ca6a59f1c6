"""canonicalize: dead code and no-ops go, repeated nodes become one.

    scaled = scale(lookup, 1.0)          ->  (uses of scaled read lookup)
    unused = linear(x, w)                ->  (gone, unless it has an effect)
    a = token_mask(d); b = token_mask(d) ->  a

Layer graphs only. Effectful nodes (collectives, mutation) are never removed and never merged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from moegraph import ops
from moegraph.graph.edit import Rewriter
from moegraph.graph.effects import eliminate_dead_code, is_effectful
from moegraph.graph.names import display_name
from moegraph.graph.program import Unit
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
        for node in list(rewriter.graph.nodes):
            if _is_no_op(node):
                rewriter.replace(node, node.args[0])  # type: ignore[arg-type]
        _merge_equal(rewriter)
        rewriter.rewritten += [display_name(node) for node in eliminate_dead_code(rewriter.graph)]
        module = rewriter.finish()
        note = "" if rewriter.rewritten else "nothing dead, nothing repeated, no no-ops"
        return PassResult(unit.with_graphs({"layer": module}), rewriter.rewritten, note)


def _is_no_op(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is ops.scale and node.args[1] == 1.0


def _merge_equal(rewriter: Rewriter) -> None:
    """Nodes with the same operator and arguments become the first of them."""
    seen: dict[Any, fx.Node] = {}
    for node in list(rewriter.graph.nodes):
        if node.op not in ("call_function", "get_attr") or is_effectful(node):
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
