"""Whether a product is worth casting to 8 bits: a roofline with the price of quantising its operands.

    seconds(bf16) = max(2·R·N·K / (e · peak), bytes / bandwidth)
    seconds(8 bit) = the same with twice the peak and half the bytes of operands, plus the bytes of its casts

    a cast of n elements, as the graph will hold it (`fold-casts`)        bytes
    kernel    read in bf16, written in 8 bits with its scales             2·n + 33/32·n
    gathered  by a kernel behind one that gathers rows for it             + 2·n / copies + 2·n
    rows      read once per token, written once per copy                  2·n / copies + 33/32·n
    beside    written by what makes it, which writes bf16 as well         33/32·n
    instead   written by what makes it, in the place of bf16              0
    made      quantised for another product already                       0
    arrived   from another rank in 8 bits: bf16 would have to be decoded  0

e = 0.7 of the dense peak is what grouped products reach (docs/performance.md: 660 to 720 of 989 on H200). The model
does not see that small products lose on 8 bits whatever the roofline says: OLMo-core measured 0.31, 0.91 and 1.43 times
the speed of bf16 at 1024², 2048² and 4096² on B300, casts included. So nothing with a side of 2048 or less is cast if a
kernel has to be added for its operands, nor what takes less than a few launches. Weights are not counted: they are
quantised once and read by many rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

EFFICIENCY = 0.7
SMALLEST = 2048  # a product with a side as long as this or shorter is left alone where a cast is a kernel more
SHORTEST = 1e-5  # seconds: what is shorter in bf16 is launches more than anything else
LOW = 33 / 32  # bytes of an element in 8 bits, with its part of a scale
# Dense bf16 operations and bytes of memory per second, from the makers' data sheets.
CHIPS = {"B300": (2250e12, 8.0e12), "H200": (989e12, 4.8e12)}
Form = Literal["kernel", "gathered", "rows", "beside", "instead", "made", "arrived"]
WORDS: dict[Form, str] = {
    "kernel": "by a kernel of its own",
    "gathered": "by a kernel of its own, once gathered",
    "rows": "once per token",
    "beside": "by what makes it, beside bf16",
    "instead": "by what makes it, instead of bf16",
    "made": "already",
    "arrived": "as they arrived",
}


@dataclass(frozen=True)
class Cast:
    """An operand's way to 8 bits: what it is, how many elements, how, and how many copies of a row are made of one."""

    what: str
    elements: int
    form: Form = "kernel"
    copies: int = 1

    @property
    def moved(self) -> float:
        """Bytes read and written beyond those that bf16 has."""
        low, gathered = LOW * self.elements, 2.0 * self.elements / self.copies
        sizes: dict[Form, float] = {
            "kernel": 2.0 * self.elements + low,
            "gathered": gathered + 4.0 * self.elements + low,
            "rows": gathered + low,
            "beside": low,
        }
        return sizes.get(self.form, 0.0)

    @property
    def is_kernel(self) -> bool:
        """Whether it is a kernel that bf16 does without."""
        return self.form in ("kernel", "gathered", "rows")

    def __str__(self) -> str:
        return f"{self.what} {WORDS[self.form]}"


@dataclass(frozen=True)
class Decision:
    """Whether a product is cast, the predicted milliseconds of both ways, of the second those of its casts, which those
    are, and why. `shape`: what kind of product, output width, contraction, rows and experts."""

    low: bool
    bf16_milliseconds: float
    low_milliseconds: float
    reason: str
    shape: tuple[str, int, int, int, int]
    cast_milliseconds: float = 0.0
    casts: tuple[Cast, ...] = ()

    def forced(self) -> Decision:
        """Cast because the spec says so."""
        return replace(self, low=True, reason="the spec asks for it")

    def kept(self, reason: str) -> Decision:
        """Not cast, for this reason."""
        return replace(self, low=False, reason=reason)

    def to_json(self) -> dict[str, Any]:
        """As JSON-able data."""
        return {**asdict(self), "shape": list(self.shape), "casts": [asdict(cast) for cast in self.casts]}


def decide(
    shape: tuple[str, int, int, int, int], side: int, chip: str = "B300", *, casts: Sequence[Cast] | None = None
) -> Decision:
    """The decision for a product of that `shape` whose weights have `side` as their shortest one; of a weight gradient
    n and k are the sides of a weight and the contraction is over the rows. `casts`: of its operands but weights; left
    out, each is a kernel of its own."""
    kind, n, k, rows, experts = shape
    peak, bandwidth = CHIPS[chip]
    operations = 2.0 * rows * n * k
    if kind == "weight gradient":
        read, written, operands = rows * (n + k), experts * n * k, {"gradient": n, "rows": k}
    else:
        read, written, operands = rows * k + experts * n * k, rows * n, {"rows": k}
    if casts is None:
        casts = [Cast(what, rows * width) for what, width in operands.items()]
    casts = tuple(casts)
    wide = max(operations / (EFFICIENCY * peak), 2 * (read + written) / bandwidth)
    narrow = max(operations / (2 * EFFICIENCY * peak), (read + 2 * written) / bandwidth)
    quantising = sum(cast.moved for cast in casts) / bandwidth
    narrow += quantising
    made = all(cast.form in ("made", "arrived") for cast in casts)
    reason = f"predicted on {chip}" + (", its rows are quantised already" if made else "")
    found = Decision(narrow < wide, 1e3 * wide, 1e3 * narrow, reason, shape, 1e3 * quantising, casts)
    if side <= SMALLEST and any(cast.is_kernel for cast in casts):
        return found.kept(f"a side of {side}: products up to {SMALLEST} were measured slower in 8 bits, casts included")
    if wide < SHORTEST:
        return found.kept(f"{1e6 * wide:.1f} µs in bf16: launches count for more")
    return found
