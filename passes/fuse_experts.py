"""fuse-experts: the region between dispatch and return becomes one operator.

    rows     = permute(x, order, inverse, offsets)         y, z = expert_ffn(x, order, inverse, offsets,
    up       = grouped_mm(rows, w_up, offsets)                               row_weight, w_up, w_down)
    act      = swiglu(up)                              =>  out  = combine(y, order, inverse, offsets)
    down     = grouped_mm(act, w_down, offsets)
    weighted = scale_rows(down, row_weight)
    out      = combine(weighted, order, inverse, offsets)

What is kept for backward is x, the pre-activation z and the int32 metadata, instead of rows, up, act and down: the
gathered rows and the activation are made again inside the backward products. Numbers stay within rounding of the
compute dtype (the router weight is applied before the down projection's result is rounded).

The region is fused where it stands exactly so, its inner values used by nothing else; a router that scales the experts'
input is left as it is.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import fx

from moegraph import ops
from moegraph.graph.edit import Rewriter
from moegraph.graph.names import display_name
from moegraph.graph.program import Unit
from moegraph.passes.contract import Level, Pass, PassContext, PassResult, Tier
from moegraph.passes.registry import registry
from moegraph.specs.schema import Spec


class _Region(NamedTuple):
    """The nodes of one region, in order."""

    rows: fx.Node
    up: fx.Node
    act: fx.Node
    down: fx.Node
    weighted: fx.Node


@registry.register
@dataclass(frozen=True)
class FuseExperts(Pass):
    """Rewrites the experts of each block into `expert_ffn`."""

    name: ClassVar[str] = "fuse-experts"
    level: ClassVar[Level] = "layer"
    tier: ClassVar[Tier] = "close"
    tolerance: ClassVar[float] = 2e-2  # bf16: a few roundings of 2⁻⁸; fp32 stays near 1e-6
    provides: ClassVar[frozenset[str]] = frozenset({"fused-experts"})

    @classmethod
    def from_spec(cls, spec: Spec) -> FuseExperts | None:
        return cls() if spec.passes.fuse_experts.enabled else None

    def apply(self, unit: Unit, context: PassContext) -> PassResult:
        rewriter = Rewriter(unit.graphs["layer"], self.name)
        combines = rewriter.find(ops.combine)
        if not combines:
            return PassResult(unit, note="no experts in this block")
        for combine in combines:
            region = _match(combine)
            if region is None:
                return PassResult(unit, note="the experts' input is scaled, or an inner value is used elsewhere")
            _fuse(rewriter, combine, region)
        return PassResult(unit.with_graphs({"layer": rewriter.finish()}), rewriter.rewritten)


def _match(combine: fx.Node) -> _Region | None:
    """The region that ends in this combine, or None where it is not exactly permute … scale_rows."""
    found: list[fx.Node] = []
    node = combine.args[0]
    for target in (ops.scale_rows, ops.grouped_mm, ops.swiglu, ops.grouped_mm, ops.permute):
        if not isinstance(node, fx.Node) or node.target is not target or len(node.users) != 1:
            return None
        found.append(node)
        node = node.args[0]
    return _Region(*reversed(found))


def _fuse(rewriter: Rewriter, combine: fx.Node, region: _Region) -> None:
    x, order, inverse, offsets = region.rows.args[:4]
    arguments = (x, order, inverse, offsets, region.weighted.args[1], region.up.args[1], region.down.args[1])
    top_k = region.rows.kwargs["top_k"]
    fused = rewriter.call_before(combine, "moe.experts", ops.expert_ffn, *arguments, top_k=top_k)
    y = rewriter.call_before(combine, "moe.expert_rows", operator.getitem, fused, 0)
    combine.replace_input_with(region.weighted, y)
    for node in reversed(region):
        rewriter.rewritten.append(display_name(node))
        rewriter.graph.erase_node(node)
