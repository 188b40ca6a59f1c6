"""cast-dispatch: rows travel to the ranks of their experts in MXFP8, and so do the gradients of what comes back.

    rows    = permute(x, order, …)                  p       = mx_encode(x)               once per token, [T, W] bytes
    there   = exchange(pack_rows(rows))             rows    = permute(p, order, …)       its K copies
    local   = permute(there, local_order, …)   =>   there   = exchange(pack_rows(rows))  33/64 of the bytes
    y       = grouped_mm(local, w_up, …)            local   = permute(there, local_order, …)
                                                    y       = grouped_mm(mx_decode(local), w_up, …)
    backward
    d_w     = grouped_mm_wgrad(d_y, local, …)       d_w     = grouped_mm_wgrad(d_y, mx_decode(local), …)

and the same with the gradient of `combine`, whose rows go the same way. With transport `direct`, `direct_dispatch` and
`direct_put` send p instead of x. Where a product takes MXFP8 operands (`cast-mxfp8` runs before), what would quantise
the rows that arrived becomes `mx_split` of their payload: nothing is quantised twice. What is kept for backward is the
payload, which `fold-decodes` then gives to weight gradients as it is. Results of experts and gradients of their input
return in bf16: they are sums of what is still to be added.

The gradient of a rounding is taken to be one, as for every cast.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import fx

from moegraph.errors import UsageError
from moegraph.graph.dispatch_cost import TripDecision, TripShape, decide_trip
from moegraph.graph.edit import Rewriter
from moegraph.graph.effects import eliminate_dead_code, is_communication
from moegraph.graph.names import display_name, facts
from moegraph.graph.program import Unit
from moegraph.ops.mx_format import BLOCK
from moegraph.passes.contract import Level, Pass, PassContext, PassResult, Tier
from moegraph.passes.low_precision import call_like
from moegraph.passes.registry import registry
from moegraph.specs.schema import Spec

_mg, _c10d = torch.ops.moegraph, torch.ops._c10d_functional
_PERMUTE, _PACK, _QUANTIZE = _mg.permute.default, _mg.pack_rows.default, _mg.mx_quantize_rows.default
_START, _WAIT, _EXACT = _c10d.all_to_all_single.default, _c10d.wait_tensor.default, _mg.exact_exchange.default
_DISPATCH, _PUT = _mg.direct_dispatch.default, _mg.direct_put.default
_IN_ORDER = torch.ops.aten.arange.default  # what `row_numbers` becomes: the order of rows that are in place


@registry.register
@dataclass(frozen=True)
class CastDispatch(Pass):
    """Sends rows, and the gradients that go the same way, as MXFP8."""

    dispatch: Literal["auto", "on"]
    ep: int

    name: ClassVar[str] = "cast-dispatch"
    level: ClassVar[Level] = "step"
    tier: ClassVar[Tier] = "close"
    tolerance: ClassVar[float] = 0.15  # one rounding to E4M3 is near 4 %; products and gradients follow
    requires: ClassVar[frozenset[str]] = frozenset({"joint"})

    @classmethod
    def from_spec(cls, spec: Spec) -> CastDispatch | None:
        dispatch = spec.precision.mxfp8.dispatch
        return cls(dispatch, spec.layout.ep) if dispatch != "off" else None

    def apply(self, unit: Unit, context: PassContext) -> PassResult:
        if self.ep == 1:
            return PassResult(unit, note="ep 1: no row leaves its rank")
        rewriter = Rewriter(unit.graphs["joint"], self.name)
        kept, trips = [], trips_of(rewriter.graph)
        if self.dispatch == "on" and any(map(is_communication, rewriter.graph.nodes)):
            _check_both_ways(unit.kind, trips)
        for trip in trips:
            found = self.decide(trip)
            facts(trip.exchange)["precision"] = found.to_json()
            if found.low:
                _Sender(rewriter, trip, recomputed=unit.options.get("recompute", "none") != "none").send()
            else:
                kept.append(f"{display_name(trip.exchange)}: {found.reason}")
        if not rewriter.rewritten:
            return PassResult(unit, note="; ".join(kept) or "no rows travel from this block")
        eliminate_dead_code(rewriter.graph)
        return PassResult(unit.with_graphs({"joint": rewriter.finish()}), rewriter.rewritten, "; ".join(kept))

    def decide(self, trip: Trip) -> TripDecision:
        """Whether these rows travel in MXFP8, and why."""
        shape = trip.shape(self.ep)
        found = decide_trip(shape)
        if shape.width % BLOCK:
            return found.kept(f"{shape.width} is not whole blocks of {BLOCK}")
        return found.forced() if self.dispatch == "on" else found


@dataclass(frozen=True)
class Trip:
    """Rows on their way out, as a joint graph has them: `source` is what they are made of, `moved` the nodes that have
    rows on the way, of which the last are those that arrived, and `exchange` the one that sends them."""

    source: fx.Node
    moved: tuple[fx.Node, ...]
    exchange: fx.Node

    @property
    def arrived(self) -> fx.Node:
        """The rows where they arrived."""
        return self.moved[-1]

    @property
    def kind(self) -> str:
        """What travels."""
        return "rows" if facts(self.exchange)["direction"] == "forward" else "gradients"

    @property
    def direct(self) -> bool:
        """Whether rows arrive in the order of their experts."""
        return self.exchange.target in (_DISPATCH, _PUT)

    def in_place(self, user: fx.Node) -> bool:
        """Whether what reads the rows that arrived is a permute that leaves them where they are."""
        if not self.direct or user.target is not _PERMUTE:
            return False
        order: Any = user.args[1]
        return bool(order.target is _IN_ORDER and user.args[4] == 1)

    def shape(self, ranks: int) -> TripShape:
        """Its sizes in a group of so many ranks."""
        tokens, width = self.source.meta["val"].shape
        arrived = self.arrived.meta["val"].shape[0]
        permutes = [user for user in self.arrived.users if user.target is _PERMUTE]
        left = [user for user in permutes if not self.in_place(user)]
        if self.direct:
            destination: Any = self.exchange.args[2 if self.exchange.target is _DISPATCH else 1]
            sent = destination.meta["val"].shape[0]
            copied = tokens + 2 * arrived  # read where they come from, and copied out of the buffer
        else:
            routed = self.moved[0].meta["val"].shape[0]
            sent = routed if self.exchange.target is _EXACT else arrived
            copied = tokens + 2 * routed + arrived  # permuted, and packed into buckets
        low = copied + 2 * arrived * len(left)
        copied += 2 * arrived * len(permutes)
        readers = list(_readers(self.arrived))
        operands = {(rows, user.args[1]) for rows, user in readers if _takes_operand(user)}
        decoded = {(rows, facts(user)["direction"]) for rows, user in readers if not _takes_operand(user)}
        return TripShape(width, ranks, tokens, sent, arrived, copied, low, len(decoded), len(operands))


def trips_of(graph: fx.Graph) -> list[Trip]:
    """Every dispatch of rows and every gradient of a return, in order."""
    found = []
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is _DISPATCH:
            taken = [user for user in node.users if user.target is operator.getitem and user.args[1] == 0]
            found += [Trip(node.args[0], (node, *taken), node)] if len(taken) == 1 else []
        elif node.target is _PUT:
            found.append(Trip(node.args[0], (node,), node))
        elif node.target in (_START, _EXACT):
            packed: Any = node.args[0]
            rows: Any = packed.args[0] if packed.target is _PACK else None
            waits = [user for user in node.users if user.target is _WAIT] if node.target is _START else [None]
            if rows is not None and rows.target is _PERMUTE and len(waits) == 1:
                behind = () if waits[0] is None else (waits[0],)
                found.append(Trip(rows.args[0], (rows, packed, node, *behind), node))
    return found


def _check_both_ways(kind: str, trips: list[Trip]) -> None:
    """Raises `UsageError` where a block's rows or gradients travel, but not as `dispatch-experts` makes them."""
    missing = {"rows", "gradients"}.difference(trip.kind for trip in trips)
    if missing:
        what = " and ".join(sorted(missing))
        raise UsageError(
            f"precision.mxfp8.dispatch on: {kind} sends {what} otherwise than dispatch-experts made it, so they cannot "
            "be cast; run the pass that changed it after cast-dispatch, or use auto"
        )


def _takes_operand(user: fx.Node) -> bool:
    """Whether the node makes the operand of an MXFP8 product of ragged rows."""
    return user.target is _QUANTIZE and user.args[1] is not None and user.args[2] is True


def _readers(rows: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """(rows, node) for what reads rows that arrived, behind permutes."""
    for user in rows.users:
        if user.target is _PERMUTE and user.args[0] is rows:
            yield from _readers(user)
        else:
            yield rows, user


@dataclass
class _Sender:
    """Rewrites one trip. `recomputed`: what forward decodes, the pass `recompute` decodes again in backward."""

    rewriter: Rewriter
    trip: Trip
    recomputed: bool
    decoded: dict[Any, fx.Node] = field(default_factory=dict)

    def send(self) -> None:
        """Makes it a trip of payloads."""
        payload = call_like(self.rewriter, self.trip.moved[0], "mx_encode", _mg.mx_encode.default, self.trip.source)
        carried = payload
        for node in self.trip.moved:
            own = self._own(node)
            own.update_arg(0, carried)
            self._evaluate(own)
            carried = own
        self._deliver(carried)

    def _own(self, node: fx.Node) -> fx.Node:
        """The node, or where it has other readers than this trip (before the exchange) a copy for the trip."""
        if node.target not in (_PERMUTE, _PACK) or len(node.users) == 1:
            return node
        return self.rewriter.copy_before(node.next, node, display_name(node), {})

    def _deliver(self, payload: fx.Node) -> None:
        """Gives the readers of rows, now a payload, what they take."""
        places = {node: place for place, node in enumerate(self.rewriter.graph.nodes)}
        for user in sorted(payload.users, key=places.__getitem__):
            if self.trip.in_place(user):
                self.rewriter.replace(user, payload)
        places = {node: place for place, node in enumerate(self.rewriter.graph.nodes)}
        for user in sorted(payload.users, key=places.__getitem__):
            if user.target is _PERMUTE and user.args[0] is payload:
                self._evaluate(user)
                self._deliver(user)
            elif _takes_operand(user):
                self.rewriter.replace(user, self._call(user, "mx_split", _mg.mx_split.default, payload, user.args[1]))
            else:
                user.replace_input_with(payload, self._rows(payload, user))

    def _rows(self, payload: fx.Node, user: fx.Node) -> fx.Node:
        """The payload's rows in bf16, made in the direction in which they are read, so that the payload is kept; once
        for both where backward makes it again anyway."""
        key = (payload, None if self.recomputed else facts(user)["direction"])
        if key not in self.decoded:
            self.decoded[key] = self._call(user, "mx_decode", _mg.mx_decode.default, payload)
        return self.decoded[key]

    def _call(self, at: fx.Node, what: str, target: Any, *args: Any) -> fx.Node:
        return call_like(self.rewriter, at, what, target, *args)

    def _evaluate(self, node: fx.Node) -> None:
        """The node's value anew, since an argument is bytes now."""
        self.rewriter.evaluate(node)
        self.rewriter.rewritten.append(display_name(node))
