"""Which steps are accepted: those that are finite and, if spikes are skipped, not far above the last ones.

Contract: decided from the agreed numbers of a step and from those of earlier ones, which all ranks have, so all decide
the same, and before anything is changed. A skipped step uses up its data and its place in the learning-rate schedule;
parameters, moments, selection biases and the optimizer's own count of steps stay as they are.

A spike is told as OLMo-core's SkipStepOptimizer does: by mean and standard deviation of the last steps. Steps that were
skipped are not among them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from moegraph.specs.schema.run import Train

_NUMBERS = ("loss", "balance_loss", "z_loss", "grad_norm")


def not_finite(record: Mapping[str, Any]) -> str | None:
    """The first of a step's numbers that is infinite or NaN, as `loss is nan`."""
    return next((f"{name} is {record[name]}" for name in _NUMBERS if not math.isfinite(record[name])), None)


class StepPolicy:
    """Counts skipped steps, in all and in a row, and keeps losses and norms of the last accepted ones."""

    def __init__(self, train: Train) -> None:
        self._non_finite, self._spikes, self.max_skips = train.non_finite, train.skip_spikes, train.max_skips
        window = self._spikes.window if self._spikes is not None else 0
        self.losses: deque[float] = deque(maxlen=window)  # nats per token
        self.norms: deque[float] = deque(maxlen=window)
        self.skipped = self.in_a_row = 0

    @property
    def skips(self) -> bool:
        """Whether any step may be skipped."""
        return self._non_finite == "skip" or self._spikes is not None

    def resume(self, skipped: int, in_a_row: int, losses: Sequence[float], norms: Sequence[float]) -> None:
        """Goes on from what a checkpoint kept."""
        self.skipped, self.in_a_row = skipped, in_a_row
        self.losses.extend(losses)
        self.norms.extend(norms)

    def why_skip(self, record: Mapping[str, Any]) -> str | None:
        """Why a step with these numbers is to be skipped, or None. `record`: loss, balance_loss, z_loss, grad_norm."""
        lost = not_finite(record)
        if lost is not None:
            return lost if self._non_finite == "skip" else None
        if self._spikes is None:
            return None
        for name, known in (("loss", self.losses), ("grad_norm", self.norms)):
            if len(known) < self._spikes.window // 2:
                continue
            mean = math.fsum(known) / len(known)
            deviation = math.sqrt(math.fsum((each - mean) ** 2 for each in known) / len(known))
            bound = mean + self._spikes.deviations * deviation
            if record[name] > bound:
                return f"{name} is {record[name]:.6g}, above {bound:.6g}"
        return None

    def accept(self, loss: float, norm: float) -> None:
        """Remembers an accepted step."""
        self.in_a_row = 0
        self.losses.append(loss)
        self.norms.append(norm)

    def skip(self) -> bool:
        """Counts a skipped step; whether the run may go on."""
        self.skipped += 1
        self.in_a_row += 1
        return self.in_a_row <= self.max_skips
