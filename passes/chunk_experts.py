"""chunk-experts: the experts' part of a block works on runs of tokens, one after the other.

    order  = sort_by_expert(ids)                   x0, x1 = split_tokens(x); likewise ids and router weights
    rows   = permute(x, order, …)                  for each run c of tokens:
    y      = experts(rows, offsets)       =>           rows = permute(xc, order, …)
    out    = combine(y, order, …)                      y    = experts(rows, offsets)       the same weights
                                                       outc = combine(y, order, …)
                                                   out = join_tokens(out0, out1)

`dispatch-experts` then sends each run on its own, and `overlap-communication` lets one travel while the experts work on
another. Routing, balance losses and counts are those of all tokens together. Every token keeps its numbers but for
rounding: products over fewer rows may be summed in another order, and weight gradients are a sum over runs (`close`).

Done only where rows travel in operators that start and wait separately (transport `padded`).
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from moegraph import ops
from moegraph.graph.edit import Rewriter
from moegraph.graph.names import display_name
from moegraph.graph.program import Unit
from moegraph.passes.contract import Level, Pass, PassContext, PassResult, Tier
from moegraph.passes.registry import registry
from moegraph.specs.schema import Spec


@registry.register
@dataclass(frozen=True)
class ChunkExperts(Pass):
    """Cuts the tokens that go to the experts into `chunks` runs of neighbours, of equal length where that divides."""

    chunks: int

    name: ClassVar[str] = "chunk-experts"
    level: ClassVar[Level] = "layer"
    tier: ClassVar[Tier] = "close"
    tolerance: ClassVar[float] = 1e-2  # of bf16: sums in another order

    @classmethod
    def from_spec(cls, spec: Spec) -> ChunkExperts | None:
        overlap = spec.passes.overlap_communication
        chunks = overlap.chunks or 1
        return cls(chunks) if overlap.mode == "on" and chunks > 1 else None

    def bound(self, compute: str) -> float:
        return {"fp32": 1e-4, "fp64": 1e-10}.get(compute, self.tolerance)

    def apply(self, unit: Unit, context: PassContext) -> PassResult:
        transport = context.spec.layout.transport
        if transport != "padded":
            return PassResult(unit, note=f"with transport {transport} nothing can run while rows travel")
        rewriter = Rewriter(unit.graphs["layer"], self.name)
        routes = rewriter.find(ops.sort_by_expert)
        if not routes:
            return PassResult(unit, note="no experts in this block")
        (sort,), (end,) = routes, rewriter.find(ops.combine)
        _cut(rewriter, _between(sort, end), self.chunks)
        return PassResult(unit.with_graphs({"layer": rewriter.finish()}), rewriter.rewritten)


def chunk_of(name: str) -> int | None:
    """The run of tokens that a node made by this pass, or made from one, works on: 1 of `moe.chunk1.rows`."""
    part = name.split("/")[0].split(".")[1:2]
    number = part[0].removeprefix("chunk") if part and part[0].startswith("chunk") else ""
    return int(number) if number.isdigit() else None


def _between(first: fx.Node, last: fx.Node) -> list[fx.Node]:
    """Nodes that depend on `first` and that `last` depends on, both included, in order."""
    inside = {first}
    for node in first.graph.nodes:
        if inside & set(node.all_input_nodes):
            inside.add(node)
    needed = {last}
    for node in reversed(first.graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    return [node for node in first.graph.nodes if node in inside and node in needed]


def _cut(rewriter: Rewriter, region: list[fx.Node], chunks: int) -> None:
    """Puts a copy of the region for each run of tokens in the place of the region."""
    first, last = region[0], region[-1]
    given = dict.fromkeys(a for node in region for a in node.all_input_nodes if a not in region and a.op != "get_attr")
    parts = {whole: _split(rewriter, first, whole, chunks) for whole in given}
    results = []
    for chunk in range(chunks):
        made = {whole: parts[whole][chunk] for whole in given}
        for node in region:
            made[node] = rewriter.copy_before(last, node, _named(node, chunk), made)
        results.append(made[last])
    rewriter.evaluate_again()
    joined = rewriter.call_before(last, f"{_head(last)}.joined", ops.join_tokens, results)
    rewriter.replace(last, joined)
    for node in reversed(region[:-1]):
        rewriter.rewritten.append(display_name(node))
        rewriter.graph.erase_node(node)


def _split(rewriter: Rewriter, anchor: fx.Node, whole: fx.Node, chunks: int) -> list[fx.Node]:
    """The runs of tokens of one value, before `anchor`."""
    cut = rewriter.call_before(anchor, f"{display_name(whole)}_split", ops.split_tokens, whole, chunks)
    taken: Any = operator.getitem
    return [rewriter.call_before(anchor, _named(whole, chunk), taken, cut, chunk) for chunk in range(chunks)]


def _head(node: fx.Node) -> str:
    return display_name(node).split(".")[0]


def _named(node: fx.Node, chunk: int) -> str:
    head, _, tail = display_name(node).partition(".")
    return f"{head}.chunk{chunk}.{tail}"
