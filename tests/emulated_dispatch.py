"""The reference of rows that travel in MXFP8: they are quantised and made bf16 again where they are made, and travel in
bf16. As a rewrite of a joint graph, and as a pass for runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from moegraph.graph.edit import Rewriter
from moegraph.graph.program import Unit
from moegraph.passes import Pass, PassContext, PassResult
from moegraph.passes.low_precision import call_like

_mg = torch.ops.moegraph
NAME = "emulated-dispatch"


def sources(graph: fx.Graph) -> list[tuple[fx.Node, fx.Node]]:
    """(what rows are made of, what makes them) of dispatched rows and of gradients of returned ones: whatever packs
    rows of K choices into buckets or sends them `direct`, and without expert parallelism, whatever permutes them."""
    direct = [n for n in graph.nodes if n.target in (_mg.direct_dispatch.default, _mg.direct_put.default)]
    permutes = [n for n in graph.nodes if n.target is _mg.permute.default]
    packed = [n for n in permutes if any(user.target is _mg.pack_rows.default for user in n.users)]
    return [(node.args[0], node) for node in direct or packed or permutes]  # type: ignore[misc]


def emulated(module: fx.GraphModule) -> Rewriter:
    """The joint graph with rows that have been through MXFP8, still under edit."""
    rewriter = Rewriter(module, NAME)
    for source, node in sources(rewriter.graph):
        payload = call_like(rewriter, node, "mx_encode", _mg.mx_encode.default, source)
        node.update_arg(0, call_like(rewriter, node, "mx_decode", _mg.mx_decode.default, payload))
    return rewriter


@dataclass(frozen=True)
class EmulatedDispatch(Pass):
    """`emulated` in a run; not registered until a test does it."""

    name: ClassVar[str] = NAME
    level: ClassVar[str] = "step"  # type: ignore[assignment]
    requires: ClassVar[frozenset[str]] = frozenset({"joint"})

    def apply(self, unit: Unit, context: PassContext) -> PassResult:
        rewriter = emulated(unit.graphs["joint"])
        if not rewriter.rewritten:
            return PassResult(unit, note="no rows travel")
        return PassResult(unit.with_graphs({"joint": rewriter.finish()}), rewriter.rewritten)
