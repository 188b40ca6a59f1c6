"""recompute: forward values that backward needs are computed again instead of being kept.

    a = f(x)            a = f(x)
    …              =>   …
    g = grad(a, t)      a' = f(x)          (made_by recompute, just before its first backward user)
                        g = grad(a', t)

`selective` computes again what is cheap (everything but matrix products, attention, losses and routing); `full`
everything but what must never be computed twice: the routing decision, offsets and dispatched rows (a top-k on ties
could flip, a collective would have to run again), anything with an effect, and random numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from moegraph import ops
from moegraph.graph.edit import Rewriter
from moegraph.graph.effects import eliminate_dead_code, is_effectful, is_random
from moegraph.graph.names import display_name, facts
from moegraph.graph.program import Unit
from moegraph.passes.contract import Level, Pass, PassContext, PassResult
from moegraph.passes.registry import registry
from moegraph.specs.schema import Spec

aten = torch.ops.aten
_EXPENSIVE: frozenset[object] = frozenset({aten.mm.default, aten.addmm.default, aten.bmm.default}).union(
    ops.SCALED_PRODUCTS, *(facts.overloads for facts in ops.OPERATORS.values() if facts.cost != "pointwise")
)


@registry.register
@dataclass(frozen=True)
class Recompute(Pass):
    """Duplicates forward nodes before their backward users, per kind of block."""

    name: ClassVar[str] = "recompute"
    level: ClassVar[Level] = "step"
    requires: ClassVar[frozenset[str]] = frozenset({"joint"})

    @classmethod
    def from_spec(cls, spec: Spec) -> Recompute | None:
        return cls() if spec.passes.recompute.enabled else None

    def apply(self, unit: Unit, context: PassContext) -> PassResult:
        policy = unit.options.get("recompute", "none")
        if policy == "none":
            return PassResult(unit, note="policy none for this block")
        rewriter = Rewriter(unit.graphs["joint"], self.name)
        _duplicate(rewriter, keep=_keep(policy))
        eliminate_dead_code(rewriter.graph)
        note = "" if rewriter.rewritten else f"policy {policy}: nothing to compute again"
        return PassResult(unit.with_graphs({"joint": rewriter.finish()}), rewriter.rewritten, note)


def _keep(policy: str) -> frozenset[object]:
    """Operators whose results are saved."""
    kept: frozenset[object] = frozenset(ops.NEVER_RECOMPUTE)
    return kept | _EXPENSIVE if policy == "selective" else kept


def _duplicate(rewriter: Rewriter, keep: frozenset[object]) -> None:
    again: dict[fx.Node, fx.Node] = {}
    for user in list(rewriter.graph.nodes):
        if user.op == "output" or facts(user).get("direction") != "backward" or user.op == "placeholder":
            continue
        for needed in user.all_input_nodes:
            if facts(needed).get("direction") == "forward":
                _again(rewriter, needed, user, keep, again)
        for old in list(user.all_input_nodes):
            if old in again:
                user.replace_input_with(old, again[old])


def _again(
    rewriter: Rewriter, root: fx.Node, anchor: fx.Node, keep: frozenset[object], again: dict[fx.Node, fx.Node]
) -> None:
    """Makes a duplicate of `root`, and of whatever it needs, before `anchor`; without recursion, graphs are deep."""
    stack = [root]
    while stack:
        node = stack[-1]
        if node in again or not _may_repeat(node, keep):
            stack.pop()
            continue
        waiting = [n for n in node.all_input_nodes if n not in again and _may_repeat(n, keep)]
        if waiting:
            stack.extend(waiting)
            continue
        copy = rewriter.copy_before(anchor, node, f"{display_name(node)}.again", again)
        facts(copy).update(direction="backward", recomputed=True)
        again[node] = copy
        stack.pop()


def _may_repeat(node: fx.Node, keep: frozenset[object]) -> bool:
    if node.op != "call_function" or is_effectful(node) or is_random(node) or node.target in keep:
        return False
    source = node.args[0] if node.args else None
    # A taken-apart result follows the call that made it: computing only the getitem again would save the tuple.
    return not (
        isinstance(source, fx.Node)
        and isinstance(source.meta.get("val"), (tuple, list))
        and not _may_repeat(source, keep)
    )
