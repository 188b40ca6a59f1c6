"""fuse-experts: the region between dispatch and return becomes one operator.

    rows     = permute(x, order, inverse, offsets)         y, z = expert_ffn(x, order, inverse, offsets,
    up       = grouped_mm(rows, w_up, offsets)                               row_weight, w_up, w_down)
    act      = swiglu(up)                              =>  out  = combine(y, order, inverse, offsets)
    down     = grouped_mm(act, w_down, offsets)
    weighted = scale_rows(down, row_weight)
    out      = combine(weighted, order, inverse, offsets)

with `add_expert_bias` behind each product where the experts have biases, and `swiglu` or `swiglu_clamped`.

What is kept for backward is x, the pre-activation z and the int32 metadata, instead of rows, up, act and down: the
gathered rows and the activation are made again inside the backward products. With `passes.fuse-experts.recompute` z is
made again too, and only x is kept. Numbers stay within rounding of the compute dtype (the router weight is applied
before the down projection's result is rounded).

The region is fused where it stands exactly so, all its parts read the same order and offsets, and its inner values are
used by nothing else. With transport `direct` it ends in `direct_return` instead of `combine`. Experts whose input the
router scales are left as they are, and the pass says so.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import fx

from moegraph import ops
from moegraph.graph.edit import Rewriter
from moegraph.graph.names import display_name
from moegraph.graph.program import Unit
from moegraph.passes.contract import Level, Pass, PassContext, PassResult, Tier
from moegraph.passes.registry import registry
from moegraph.specs.schema import Spec


class _Region(NamedTuple):
    """The nodes of one region by what they are; a bias is the node that adds it."""

    rows: fx.Node
    up: fx.Node
    up_bias: fx.Node | None
    act: fx.Node
    down: fx.Node
    down_bias: fx.Node | None
    weighted: fx.Node

    def nodes(self) -> list[fx.Node]:
        """Those that are there, in order."""
        return [node for node in self if node is not None]


@registry.register
@dataclass(frozen=True)
class FuseExperts(Pass):
    """Rewrites the experts of each block into `expert_ffn`; with `recompute` the pre-activation is not kept."""

    recompute: bool = False

    name: ClassVar[str] = "fuse-experts"
    level: ClassVar[Level] = "layer"
    tier: ClassVar[Tier] = "close"
    tolerance: ClassVar[float] = 2e-2  # bf16: a few roundings of 2⁻⁸; fp32 stays near 1e-6
    provides: ClassVar[frozenset[str]] = frozenset({"fused-experts"})

    @classmethod
    def from_spec(cls, spec: Spec) -> FuseExperts | None:
        options = spec.passes.fuse_experts
        return cls(options.recompute) if options.enabled else None

    def apply(self, unit: Unit, context: PassContext) -> PassResult:
        rewriter = Rewriter(unit.graphs["layer"], self.name)
        ends = rewriter.find(ops.combine) + rewriter.find(ops.direct_return)
        if not ends:
            return PassResult(unit, note="no experts in this block")
        note = ""
        for end in ends:
            if end.args[0].target is ops.unpack_rows:  # type: ignore[union-attr]
                continue  # rows that came back from other ranks: the experts are before the exchange
            region = _match(end)
            if isinstance(region, str):
                note = f"left as it is: {region}"
            else:
                _fuse(rewriter, end, region, self.recompute)
        if not rewriter.rewritten:
            return PassResult(unit, note=note)
        return PassResult(unit.with_graphs({"layer": rewriter.finish()}), rewriter.rewritten, note)


_CHAIN = {  # from the region's end to its beginning, and whether a step may be missing
    "weighted": ((ops.scale_rows,), False),
    "down_bias": ((ops.add_expert_bias,), True),
    "down": ((ops.grouped_mm,), False),
    "act": ((ops.swiglu, ops.swiglu_clamped), False),
    "up_bias": ((ops.add_expert_bias,), True),
    "up": ((ops.grouped_mm,), False),
    "rows": ((ops.permute,), False),
}


def _match(end: fx.Node) -> _Region | str:
    """The region that ends in this combine or return, or why it is not exactly permute … scale_rows."""
    found: dict[str, fx.Node | None] = {}
    node = end.args[0]
    for name, (targets, optional) in _CHAIN.items():
        if not isinstance(node, fx.Node) or node.target not in targets:
            if optional:
                found[name] = None
                continue
            unscaled = (
                name == "weighted"
                and isinstance(node, fx.Node)
                and node.target in (ops.grouped_mm, ops.add_expert_bias)
            )
            return "its experts' input is scaled" if unscaled else "it is not what lowering makes"
        if len(node.users) != 1:
            return f"{display_name(node)} is used elsewhere too"
        found[name] = node
        node = node.args[0]
    region = _Region(**found)  # type: ignore[arg-type]
    metadata, top_k = region.rows.args[1:4], region.rows.kwargs["top_k"]
    if end.target is ops.combine:
        same = end.args[1:4] == metadata and end.kwargs["top_k"] == top_k
    else:  # its order is in where rows go; they are returned as they were dispatched
        same = bool(end.args[3] is metadata[2] and top_k == 1)
    reads_offsets = (region.up, region.up_bias, region.down, region.down_bias)
    if not same or any(node is not None and node.args[2] is not metadata[2] for node in reads_offsets):
        return "its parts read different orders or offsets"
    return region


def _fuse(rewriter: Rewriter, end: fx.Node, region: _Region, recompute: bool) -> None:
    x, order, inverse, offsets = region.rows.args[:4]
    weights = (region.weighted.args[1], region.up.args[1], region.down.args[1])
    biases = tuple(None if node is None else node.args[1] for node in (region.up_bias, region.down_bias))
    options: dict[str, Any] = {"top_k": region.rows.kwargs["top_k"]}
    if region.act.target is ops.swiglu_clamped:
        options["clamp"] = (region.act.kwargs["alpha"], region.act.kwargs["limit"])
    if recompute:
        options["recompute"] = True
    arguments = (x, order, inverse, offsets, *weights, *(biases if any(biases) else ()))
    prefix = display_name(end).rpartition(".")[0]  # `moe`, or `moe.chunk0` for one run of tokens
    fused = rewriter.call_before(end, f"{prefix}.experts", ops.expert_ffn, *arguments, **options)
    y = rewriter.call_before(end, f"{prefix}.expert_rows", operator.getitem, fused, 0)
    end.replace_input_with(region.weighted, y)
    for node in reversed(region.nodes()):
        rewriter.rewritten.append(display_name(node))
        rewriter.graph.erase_node(node)
