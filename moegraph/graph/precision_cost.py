"""Whether a product is worth casting to 8 bits: a roofline with the price of quantising its rows.

    seconds(bf16) = max(2·R·N·K / (e · peak), bytes / bandwidth)
    seconds(8 bit) = the same with twice the peak and half the bytes of operands, plus reading R·K in bf16 and writing
                     it in 8 bits with its scales

e = 0.7 of the dense peak is what grouped products reach (docs/performance.md: 660 to 720 of 989 on H200). The model
does not see that small products lose on 8 bits whatever the roofline says: OLMo-core measured 0.31, 0.91 and 1.43 times
the speed of bf16 at 1024², 2048² and 4096² on B300, so nothing with a side of 2048 or less is cast unless its rows
have been quantised for another product already: then they cost nothing. Weights are not counted: they are quantised
once and read by many rows. The price of quantising is that of a kernel of its own; folded into what makes the rows
(pass `fold-casts`) it is less.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

EFFICIENCY = 0.7
SMALLEST = 2048  # a product with a side as long as this or shorter is left alone
# Dense bf16 operations and bytes of memory per second, from the makers' data sheets.
CHIPS = {"B300": (2250e12, 8.0e12), "H200": (989e12, 4.8e12)}


@dataclass(frozen=True)
class Decision:
    """Whether a product is cast, the predicted milliseconds of both ways, and why. `shape`: what kind of product,
    output width, contraction, rows and experts."""

    low: bool
    bf16_milliseconds: float
    low_milliseconds: float
    reason: str
    shape: tuple[str, int, int, int, int]

    def forced(self) -> Decision:
        """Cast because the spec says so."""
        return replace(self, low=True, reason="the spec asks for it")

    def kept(self, reason: str) -> Decision:
        """Not cast, for this reason."""
        return replace(self, low=False, reason=reason)

    def to_json(self) -> dict[str, Any]:
        """As JSON-able data."""
        return {**asdict(self), "shape": list(self.shape)}


def decide(
    shape: tuple[str, int, int, int, int], side: int, chip: str = "B300", *, quantised: bool = False
) -> Decision:
    """The decision for a product of that `shape` whose weights have `side` as their shortest one; of a weight gradient
    n and k are the sides of a weight and the contraction is over the rows. `quantised`: its rows are already."""
    kind, n, k, rows, experts = shape
    peak, bandwidth = CHIPS[chip]
    operations = 2.0 * rows * n * k
    if kind == "weight gradient":
        read, written, cast = rows * (n + k), experts * n * k, rows * (n + k)
    else:
        read, written, cast = rows * k + experts * n * k, rows * n, rows * k
    wide = max(operations / (EFFICIENCY * peak), 2 * (read + written) / bandwidth)
    narrow = max(operations / (2 * EFFICIENCY * peak), (read + 2 * written) / bandwidth)
    narrow += 0.0 if quantised else cast * (2 + 1 + 1 / 32) / bandwidth
    reason = f"predicted on {chip}" + (", its rows are quantised already" if quantised else "")
    found = Decision(narrow < wide, 1e3 * wide, 1e3 * narrow, reason, shape)
    if side <= SMALLEST and not quantised:
        return found.kept(f"a side of {side}: products up to {SMALLEST} were measured slower in 8 bits")
    return found
