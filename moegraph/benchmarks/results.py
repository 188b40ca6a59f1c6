"""What timing one shape found, as plain data."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from moegraph.benchmarks.shapes import Shape

WRONG = 2e-2  # no arithmetic in bfloat16 is that far off
WRONG_TILE = 0.2  # of one tile of 128 × 128; a tile that was not written is 1
WRONG_FP8, WRONG_FP8_TILE = 0.15, 0.5  # of products whose operands have errors of 3e-2 to begin with


@dataclass(frozen=True)
class Timing:
    """Milliseconds, 10¹² operations per second, that over the dense product's, and the floor's time over this one."""

    milliseconds: float
    least_milliseconds: float
    tflops: float | None = None
    share_of_dense: float | None = None
    share_of_floor: float | None = None

    @classmethod
    def of(
        cls,
        seconds: Sequence[float],
        operations: float | None = None,
        dense_rate: float | None = None,
        floor_seconds: float | None = None,
    ) -> Timing:
        """From the seconds of every run; the median counts."""
        median = statistics.median(seconds)
        return cls(
            milliseconds=median * 1e3,
            least_milliseconds=min(seconds) * 1e3,
            tflops=None if operations is None else operations / median / 1e12,
            share_of_dense=None if operations is None or dense_rate is None else operations / median / dense_rate,
            share_of_floor=None if floor_seconds is None else floor_seconds / median,
        )


@dataclass
class Row:
    """One way to run the block. Bytes are None where they are not known, errors where they were not asked for.

    `error` is ‖have - float64‖ / ‖float64‖ by value, `worst_tile` the largest of the same over tiles of 128 × 128, and
    `agreement` the largest ‖have - moegraph's‖ / ‖moegraph's‖ over all values at the full shape. Casts are what a row
    of low precision quantises in a pass, timed alone.
    """

    name: str
    forward: Timing | None = None
    forward_backward: Timing | None = None
    saved_bytes: int | None = None
    peak_bytes: int | None = None
    error: dict[str, float] | None = None
    worst_tile: dict[str, float] | None = None
    agreement: float | None = None
    low_precision: bool = False
    forward_cast: Timing | None = None
    forward_backward_cast: Timing | None = None

    @property
    def sqnr(self) -> dict[str, float]:
        """Signal over noise against float64 in decibels, by value: -20 · log10 of the relative error."""
        return {name: -20 * math.log10(value) if value else math.inf for name, value in (self.error or {}).items()}

    def cast_share(self, which: str) -> float | None:
        """Time of the casts alone over that of the whole pass, `forward` or `forward_backward`."""
        whole, cast = getattr(self, which), getattr(self, f"{which}_cast")
        return cast.milliseconds / whole.milliseconds if whole is not None and cast is not None else None

    def wrong(self) -> list[str]:
        """What is too far from float64 or from moegraph to be rounding, as `value figure`; NaN is too far."""
        limit, of_tile = (WRONG_FP8, WRONG_FP8_TILE) if self.low_precision else (WRONG, WRONG_TILE)
        checked = [
            *((name, value, limit) for name, value in (self.error or {}).items()),
            *((f"a tile of {name}", value, of_tile) for name, value in (self.worst_tile or {}).items()),
        ]
        if self.agreement is not None:
            checked.append(("agreement", self.agreement, limit))
        return [f"{name} {value:.1e}" for name, value, most in checked if not value <= most]


@dataclass
class LayerReport:
    """Figures of one shape; rates per second. `failed` names rows that could not be run, with reason and traceback."""

    shape: Shape
    device: str
    torch: str
    dtype: str
    compiled: bool
    dense: str
    dense_rate_before: float = 0.0
    dense_rate: float = 0.0
    dense_rate_after: float = 0.0
    copy_bytes_per_second: float = 0.0
    floor_bytes: dict[str, float] = field(default_factory=dict)
    error_tokens: int | None = None
    rows: dict[str, Row] = field(default_factory=dict)
    failed: dict[str, dict[str, str]] = field(default_factory=dict)

    def row(self, name: str) -> Row:
        """The row of that name, made if there is none."""
        return self.rows.setdefault(name, Row(name))

    def wrong(self) -> dict[str, list[str]]:
        """Rows whose values are not right, and which ones."""
        return {name: row.wrong() for name, row in self.rows.items() if row.wrong()}

    def to_json(self) -> dict[str, Any]:
        """As JSON-able data; rows in order, what failed and what is wrong by row."""
        return {**asdict(self), "rows": [asdict(row) for row in self.rows.values()], "wrong": self.wrong()}
