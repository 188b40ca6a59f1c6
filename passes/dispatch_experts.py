"""dispatch-experts: experts stay on the ranks that hold them, and rows travel to them and back.

    rows = permute(x, order, …)           rows    = permute(x, order, …)               sorted by expert of the model
    y    = experts(rows, offsets)    =>   arrived = exchange(pack_rows(rows))          buckets, one per rank
    out  = combine(y, order, …)           local   = permute(arrived, local_order, …)   sorted by expert of this rank
                                          y       = experts(local, local_offsets)      weights [E/ep, …]
                                          back    = exchange(combine(y, local_order, …))
                                          out     = combine(unpack_rows(back), order, …)

The router weight travels with its row. How many rows of which expert arrive is exchanged first (`counts`), and stays on
the device. Every collective is a pair of nodes, its start and its wait. Transports:

- `padded`: buckets of a fixed capacity, exchanged whole; the host waits for nothing. The block reports `overflow`, how
  many rows did not fit. With `overflow: drop` the router's choices are thinned out beforehand, by weight, until they
  do.
- `exact`: only rows that exist travel, in buckets that hold any routing. The host waits for the counts: the reference.
- `direct`: each row is written straight to its place in its owner's buffer, already sorted by expert, by the opaque
  pair `direct_dispatch` and `direct_return`, whose declared equivalent is an exchange as in `padded`. Only the counts
  of all ranks are a collective. A buffer has room for as many rows as the buckets of `padded`, whoever sends them.

Numbers are those of the undistributed graph; sums over rows of several ranks are added up in another order, so that
weight gradients agree to rounding (`close`).
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

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
class DispatchExperts(Pass):
    """Shards expert weights over `ep` ranks and inserts dispatch and return."""

    ep: int
    transport: Literal["exact", "padded", "direct"]
    capacity: float  # of a bucket, in balanced loads
    drop: bool  # choices that do not fit are dropped by rule, instead of being counted

    name: ClassVar[str] = "dispatch-experts"
    level: ClassVar[Level] = "layer"
    tier: ClassVar[Tier] = "close"
    tolerance: ClassVar[float] = 1e-2  # of bf16: sums in another order
    provides: ClassVar[frozenset[str]] = frozenset({"expert-parallel"})

    @classmethod
    def from_spec(cls, spec: Spec) -> DispatchExperts | None:
        layout = spec.layout
        drop = layout.overflow == "drop" and layout.transport != "exact"
        return cls(layout.ep, layout.transport, layout.capacity, drop)

    def bound(self, compute: str) -> float:
        return {"fp32": 1e-4, "fp64": 1e-10}.get(compute, self.tolerance)

    def apply(self, unit: Unit, context: PassContext) -> PassResult:
        if self.ep == 1:
            return PassResult(unit, note="ep 1: every rank holds all experts")
        rewriter = Rewriter(unit.graphs["layer"], self.name)
        routes = rewriter.find(ops.sort_by_expert)
        if not routes:
            return PassResult(unit, note="no experts in this block")
        kind = _Direct if self.transport == "direct" else _Dispatch
        dispatches = [kind(rewriter, sort, self) for sort in routes]  # one, or with chunk-experts one per run of tokens
        for dispatch in dispatches:
            dispatch.outward()
        rewriter.evaluate_again()  # not before: all runs read the same weights, which are now those of one rank
        for dispatch in dispatches:
            dispatch.homeward()
        _report(rewriter, "dropped", [each.dropped for each in dispatches])
        _report(rewriter, "overflow", [each.overflow for each in dispatches])
        return PassResult(unit.with_graphs({"layer": rewriter.finish()}), rewriter.rewritten)


def _report(rewriter: Rewriter, name: str, counts: list[fx.Node | None]) -> None:
    """Makes the sum of these counts an output of the block, where they were counted."""
    found = [count for count in counts if count is not None]
    if not found:
        return
    total = found[0]
    for count in found[1:]:
        total = rewriter.call_before(rewriter.output_node(), f"moe.{name}_total", ops.add, total, count)
    rewriter.set_output("metric", name, total)


class _Dispatch:
    """The rewrite of one block's experts, or of one run of its tokens. `overflow` and `dropped` are what it counts."""

    def __init__(self, rewriter: Rewriter, sort: fx.Node, options: DispatchExperts) -> None:
        self.rewriter, self.sort, self.options = rewriter, sort, options
        taken = rewriter.results(sort)
        self.order, self.inverse, self.offsets = taken[0], taken[1], taken[2]
        (self.rows,) = (node for node in rewriter.find(ops.permute) if self.order in node.args)
        (self.row_weight,) = (node for node in rewriter.find(ops.gather_weights) if self.order in node.args)
        (self.combine,) = (node for node in rewriter.find(ops.combine) if self.order in node.args)
        self.prefix = display_name(sort).removesuffix(".sort")  # `moe`, or `moe.chunk0` for one run of tokens
        self.overflow: fx.Node | None = None
        self.dropped: fx.Node | None = None
        self.count = int(self.rows.meta["val"].shape[0])
        if options.transport == "exact":
            self.capacity = self.count
        else:
            self.capacity = ops.bucket_capacity(self.count, options.ep, options.capacity)
        self.after = self._expert_region()[0]  # dispatch goes before the first node that needs it

    def outward(self) -> None:
        """Rows go to the ranks of their experts, and the region in between works on what arrives there."""
        region = self._expert_region()
        for node in region:
            for argument in node.all_input_nodes:
                if argument.op == "get_attr":
                    self._shard(argument)
        if self.options.drop:
            self._drop()
        for old, new in self._outward().items():
            for node in region:
                node.replace_input_with(old, new)

    def homeward(self) -> None:
        """The region's results go back, and what found no place is counted."""
        self._homeward()
        self.rewriter.evaluate_again()
        if self.options.transport != "exact" and not self.options.drop:
            self.overflow = self._lost()

    def _lost(self) -> fx.Node:
        """How many rows found no place."""
        return self._call("overflow", ops.overflow, self.offsets, **self._buckets())

    def _expert_region(self) -> list[fx.Node]:
        """Nodes between permute and combine, in order."""
        inside = {self.rows}
        for node in self.rewriter.graph.nodes:
            if node is not self.combine and node is not self.rows and inside & set(node.all_input_nodes):
                if node.op == "output" or node.target is ops.combine:
                    continue
                inside.add(node)
        before = self._before_combine(inside)
        return [n for n in self.rewriter.graph.nodes if n in before and n is not self.rows]

    def _before_combine(self, inside: set[fx.Node]) -> set[fx.Node]:
        found: set[fx.Node] = set()
        stack = [node for node in self.combine.all_input_nodes if node in inside]
        while stack:
            node = stack.pop()
            if node in inside and node not in found:
                found.add(node)
                stack.extend(node.all_input_nodes)
        return found

    def _buckets(self) -> dict[str, Any]:
        return {"ranks": self.options.ep, "capacity": self.capacity}

    def _call(self, name: str, target: Any, *args: Any, anchor: fx.Node | None = None, **kwargs: Any) -> fx.Node:
        return self.rewriter.call_before(anchor or self.after, f"{self.prefix}.{name}", target, *args, **kwargs)

    def _shard(self, weight: fx.Node) -> None:
        parameter = self.rewriter.module.meta["parameters"][weight.target]
        if parameter.experts and parameter.shards == 1:
            shape = (parameter.shape[0] // self.options.ep, *parameter.shape[1:])
            self.rewriter.resize_parameter(weight, replace(parameter, shape=shape, shards=self.options.ep))

    def _drop(self) -> None:
        """Thins the choices out before they are sorted."""
        ids, experts = self.sort.args[0], self.sort.args[1]
        weights = self.row_weight.args[0]
        options = {"num_experts": experts, **self._buckets()}
        kept = self._call("kept", ops.drop_overflow, ids, weights, anchor=self.sort, **options)
        self.sort.replace_input_with(ids, kept)  # type: ignore[arg-type]
        self.dropped = self._call("dropped", ops.count_dropped, ids, kept)

    def _outward(self) -> dict[fx.Node, fx.Node]:
        """Rows and weights to their experts' ranks. Maps what the experts read to what they are to read."""
        ep, one = self.options.ep, [1] * self.options.ep
        counts = self._call("send_counts", ops.expert_counts_to_send, self.offsets, **self._buckets())
        arrived = self._exchange("counts", counts, one)
        self.sent = self.received = None
        if self.options.transport == "exact":
            self.sent = self._call("rows_sent", ops.rows_per_rank, counts)
            self.received = self._call("rows_received", ops.rows_per_rank, arrived)
        rows = self._call("packed_rows", ops.pack_rows, self.rows, self.offsets, **self._buckets())
        there = self._exchange("dispatch", rows, [self.capacity] * ep, self.sent, self.received)
        column = self._call("weight_column", ops.as_column, self.row_weight)
        weights = self._call("packed_weights", ops.pack_rows, column, self.offsets, **self._buckets())
        weights_there = self._exchange("dispatch_weights", weights, [self.capacity] * ep, self.sent, self.received)
        experts = self._call("received_experts", ops.received_experts, arrived, self.capacity)
        local_count = int(self.offsets.meta["val"].shape[0]) // ep
        sort = self._call("local_sort", ops.sort_by_expert, experts, local_count)
        names = ("order", "inverse", "offsets")
        self.local = [self._call(f"local_{n}", operator.getitem, sort, i) for i, n in enumerate(names)]
        local_rows = self._call("local_rows", ops.permute, there, *self.local, top_k=1)
        local_weight = self._call("local_row_weight", ops.gather_weights, weights_there, *self.local)
        return {self.rows: local_rows, self.row_weight: local_weight, self.offsets: self.local[2]}

    def _homeward(self) -> None:
        """Results back to the ranks their rows came from."""
        (result,) = [n for n in self.combine.all_input_nodes if n not in (self.order, self.inverse, self.offsets)]
        placed = self._call("local_results", ops.combine, result, *self.local, anchor=self.combine, top_k=1)
        size = [self.capacity] * self.options.ep
        back = self._exchange("return", placed, size, self.received, self.sent, anchor=self.combine)
        ranks: dict[str, Any] = {"ranks": self.options.ep, "count": self.count}
        rows = self._call("returned", ops.unpack_rows, back, self.offsets, anchor=self.combine, **ranks)
        self.combine.replace_input_with(result, rows)

    def _exchange(
        self,
        name: str,
        x: fx.Node,
        sizes: list[int],
        send: fx.Node | None = None,
        receive: fx.Node | None = None,
        anchor: fx.Node | None = None,
    ) -> fx.Node:
        """x to the ranks of the expert group: buckets whole, or with counts only the rows that exist."""
        group = ops.EXPERT_GROUP
        if send is not None:
            return self._call(name, ops.exact_exchange, x, send, receive, group, anchor=anchor)
        started = self._call(f"{name}_start", ops.all_to_all_start, x, sizes, sizes, group, anchor=anchor)
        return self._call(name, ops.all_to_all_wait, started, sizes, sizes, group, anchor=anchor)


class _Direct(_Dispatch):
    """The rewrite for transport `direct`.

    counts   = all ranks' counts of rows per expert     a collective, [P, E + 1]
    plan     = direct_plan(inverse, offsets, counts)    destination, local offsets, lost
    arrived  = direct_dispatch(x, weights, …)           sorted by expert of this rank
    local    = permute(arrived, numbers, …, top_k=1)    in place already: fuse-experts takes it in
    out      = direct_return(experts(local), …)         instead of combine
    """

    def _outward(self) -> dict[fx.Node, fx.Node]:
        ep, x, weights = self.options.ep, self.rows.args[0], self.row_weight.args[0]
        told = self._call("counts_told", ops.counts_for_ranks, self.offsets, ep)
        self.counts = self._exchange("counts", told, [1] * ep)
        room = ep * self.capacity
        plan = self._call("plan", ops.direct_plan, self.inverse, self.offsets, self.counts, room)
        names = ("destination", "local_offsets", "overflow")
        self.destination, self.local_offsets, self.lost = (
            self._call(f"{name}", operator.getitem, plan, i) for i, name in enumerate(names)
        )
        where = (self.destination, self.local_offsets, self.counts)
        sent = self._call("dispatch", ops.direct_dispatch, x, weights, *where, room, ops.EXPERT_GROUP)
        arrived = self._call("arrived", operator.getitem, sent, 0)
        weight = self._call("local_row_weight", operator.getitem, sent, 1)
        self.origin = self._call("origin", operator.getitem, sent, 2)
        numbers = self._call("local_order", ops.row_numbers, arrived)
        rows = self._call("local_rows", ops.permute, arrived, numbers, numbers, self.local_offsets, top_k=1)
        return {self.rows: rows, self.row_weight: weight, self.offsets: self.local_offsets}

    def _homeward(self) -> None:
        (result,) = [n for n in self.combine.all_input_nodes if n not in (self.order, self.inverse, self.offsets)]
        where = (self.origin, self.destination, self.local_offsets, self.counts)
        top_k = self.rows.kwargs["top_k"]
        out = self._call("return", ops.direct_return, result, *where, top_k, ops.EXPERT_GROUP, anchor=self.combine)
        self.rewriter.replace(self.combine, out)
        for unused in (self.rows, self.row_weight, self.order):
            self.rewriter.graph.erase_node(unused)

    def _lost(self) -> fx.Node:
        return self.lost
