"""Whether rows gain by travelling in MXFP8: the time on the link that is saved against the time of the casts.

    seconds = bytes to other ranks / link + bytes read and written on the way / memory + casts / memory

Of N rows that can travel in an expert group of P ranks (P-1)/P are taken to leave their rank, as with a balanced
routing. In bf16 an element has 2 bytes, as a payload 33/32. What is read and written on the way are the copies of rows
into buckets and order, which a payload halves as well. Its casts are: quantised once at the sender, per token and not
per row; where rows arrive, made bf16 again for every product that takes bf16 (in forward, and for a weight gradient in
backward), or, where the product takes MXFP8, taken apart into its operand, which bf16 rows are quantised for instead.

Rates are those of `machine`: a link is NVLink within a node, one way. Over a slower network more is saved than is
predicted here.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from moegraph.graph.machine import LINK, MACHINES, MEMORY

BF16, PAYLOAD = 2.0, 33 / 32  # bytes of an element


@dataclass(frozen=True)
class TripShape:
    """Rows of `width` elements that travel among `ranks`: `tokens` are quantised, `sent` rows can travel, `arrived`
    rows are there afterwards; `copied` and `copied_low` rows are read or written on the way in bf16 and as payloads. Of
    what arrived `decoded` copies are made in bf16 and `operands` in MXFP8."""

    width: int
    ranks: int
    tokens: int
    sent: int
    arrived: int
    copied: int
    copied_low: int
    decoded: int
    operands: int

    def wire_bytes(self, element: float) -> int:
        """Bytes that a rank sends to others."""
        return round(self.sent * self.width * element * (self.ranks - 1) / self.ranks)


@dataclass(frozen=True)
class TripDecision:
    """Whether rows travel in MXFP8, what a rank sends to others and the predicted milliseconds both ways, and why."""

    low: bool
    bf16_bytes: int
    low_bytes: int
    bf16_milliseconds: float
    low_milliseconds: float
    reason: str

    def forced(self) -> TripDecision:
        """In MXFP8 because the spec says so."""
        return replace(self, low=True, reason="the spec asks for it")

    def kept(self, reason: str) -> TripDecision:
        """In bf16, for this reason."""
        return replace(self, low=False, reason=reason)

    def to_json(self) -> dict[str, Any]:
        """As JSON-able data."""
        return asdict(self)


def decide_trip(shape: TripShape, chip: str = "B300") -> TripDecision:
    """The decision for these rows on that chip."""
    machine = MACHINES[chip]
    link, memory = LINK * machine.link, MEMORY * machine.memory
    cast = BF16 + PAYLOAD  # read in one format, written in the other
    arrived = float(shape.arrived)
    wide = shape.wire_bytes(BF16) / link
    wide += (BF16 * shape.copied + cast * arrived * shape.operands) * shape.width / memory
    narrow = shape.wire_bytes(PAYLOAD) / link
    casts = cast * (shape.tokens + arrived * shape.decoded) + 2 * PAYLOAD * arrived * shape.operands
    narrow += (PAYLOAD * shape.copied_low + casts) * shape.width / memory
    sizes = shape.wire_bytes(BF16), shape.wire_bytes(PAYLOAD)
    return TripDecision(narrow < wide, *sizes, 1e3 * wide, 1e3 * narrow, f"predicted on {chip}")
