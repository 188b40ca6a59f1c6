"""Tuning: for each grouped product the fastest of its candidate configurations, found within a time budget.

    for each shape class, with an equal share of the time that is left:
      the rule's configuration is compiled, run and timed: it is the best so far
      until the share is used up or no candidate is left:
        the next few candidates that change least of the best so far are compiled; what fails or spills is skipped
        each is run once; one whose result differs from the first's is skipped
        all of them and the best so far are timed in turn; the fastest is the best so far
      the best few, the rule's and torch's grouped kernel are timed in turn, longer: this is what the entry says

Candidates that were not reached are counted and said. What compiles, runs and times is given (`Trial`), so this file
needs no device.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, Protocol

import torch
from torch import Tensor

from moegraph.kernels.candidates import candidates, changes
from moegraph.kernels.config import Config
from moegraph.kernels.shapes import TORCH_HAS, Problem
from moegraph.kernels.tuning_table import Entry

TORCH: Literal["_grouped_mm"] = "_grouped_mm"
Way = Config | Literal["_grouped_mm"]
_BATCH, _FINALISTS = 8, 4
_TURNS, _FINAL_TURNS, _LEAST_TURNS = 4, 20, 3
_FINAL_SHARE = 0.1  # of a class's time, kept for the last comparison
_WORTH = 0.99  # a configuration takes the place of the rule's, or torch's kernel of moegraph's, for 1 % less time
_TOLERANCE = {torch.float32: 1e-5}
_ROUNDED = 5e-3  # two roundings of a sum to 16 bits


class Rejected(Exception):
    """A configuration that cannot be used: `failed` to compile or run, `spills`, `too large`, or `wrong`."""


class Trial(Protocol):
    """One problem on one device, with inputs of its own."""

    def compile(self, config: Config) -> None:
        """Compiles a configuration. Raises Rejected."""

    def result(self, way: Way) -> tuple[Tensor, ...]:
        """What it computes. Raises Rejected."""

    def milliseconds(self, ways: Sequence[Way], turns: int) -> list[float]:
        """The median time of each, run in turn `turns` times after a warm-up."""


@dataclass(frozen=True)
class Outcome:
    """What tuning found for a class. `entry` is None where nothing could be measured, and `why` says why."""

    problem: Problem
    entry: Entry | None
    candidates: int
    tried: int = 0
    skipped: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    why: str = ""

    @property
    def not_reached(self) -> int:
        """Candidates that the budget did not reach."""
        return self.candidates - self.tried


def tune(
    problems: Sequence[Problem],
    begin: Callable[[Problem], Trial],
    *,
    capability: int,
    seconds: float,
    versions: Mapping[str, str],
    date: str,
    clock: Callable[[], float] = time.monotonic,
    report: Callable[[str], None] = lambda text: None,
) -> Iterator[Outcome]:
    """Tunes problems one after the other for `seconds` in all, and yields each outcome as it is found.

    `begin` makes a problem's trial; `capability` is the chip's (a key of `CHIPS`); `versions` and `date` go into the
    entries; `report` is told what is being done.
    """
    end = clock() + seconds
    for number, problem in enumerate(problems):
        began = clock()
        every = candidates(problem.kernel, problem.dtype, problem.n, problem.k, capability)
        if began >= end:
            yield Outcome(problem, None, len(every), why="not reached within the time budget")
            continue
        deadline = began + (end - began) / (len(problems) - number)
        label = f"{number + 1}/{len(problems)} {problem.shape}"
        search = _Search(problem, every, deadline, clock, partial(_labelled, report, label))
        try:
            search.run(begin(problem))
        except Rejected as error:
            cause = str(error.__cause__ or "").strip().partition("\n")[0][:200]
            why = f"the rule's configuration cannot be measured ({error}{': ' if cause else ''}{cause})"
            yield Outcome(problem, None, len(every), search.tried, dict(search.skipped), clock() - began, why)
            continue
        entry = search.entry(versions, date)
        yield Outcome(problem, entry, len(every), search.tried, dict(search.skipped), clock() - began)


class _Search:
    """The search for one class."""

    def __init__(
        self,
        problem: Problem,
        every: Sequence[Config],
        deadline: float,
        clock: Callable[[], float],
        report: Callable[[str], None],
    ) -> None:
        self.problem, self.rule, self.count = problem, every[0], len(every)
        self.left = list(every[1:])
        self.tried = 0
        self.skipped: Counter[str] = Counter()
        self.times: dict[Way, float] = {}  # of the last comparison each took part in
        self._clock, self._deadline, self._report = clock, deadline, report
        self._reference: tuple[Tensor, ...] = ()

    def run(self, trial: Trial) -> None:
        """Raises Rejected if the rule's configuration itself cannot be used."""
        self.tried = 1
        trial.compile(self.rule)
        self._reference = trial.result(self.rule)
        best = self.rule
        until = self._deadline - _FINAL_SHARE * (self._deadline - self._clock())
        first: list[Way] = [best]
        if self.problem.kernel in TORCH_HAS and self.problem.dtype == torch.bfloat16 and self._usable(trial, TORCH):
            first.append(TORCH)
        self.times.update(zip(first, trial.milliseconds(first, _TURNS), strict=True))
        while self.left and self._clock() < until:
            batch = [each for each in self._next(best) if self._clock() < until and self._usable(trial, each)]
            if batch:
                self.times.update(zip([best, *batch], trial.milliseconds([best, *batch], _TURNS), strict=True))
                best = self._fastest(1)[0]
        self._compare(trial)

    def entry(self, versions: Mapping[str, str], date: str) -> Entry:
        """The entry, after `run`."""
        (best,) = self._fastest(1)
        if self.times[best] > _WORTH * self.times[self.rule]:
            best = self.rule
        ms, p = self.times[best], self.problem
        against = {"rule": self.times[self.rule]} | ({TORCH: self.times[TORCH]} if TORCH in self.times else {})
        backend = TORCH if against.get(TORCH, ms) < _WORTH * ms else "triton"
        rate = p.operations / ms / 1e9
        return Entry(p.shape, backend, best, ms, rate, against, p.rows, p.experts, dict(versions), date)

    def _fastest(self, count: int) -> list[Config]:
        configs = [way for way in self.times if isinstance(way, Config)]
        return sorted(configs, key=self.times.__getitem__)[:count]

    def _next(self, best: Config) -> Iterator[Config]:
        """The candidates to try now, taken from those that are left."""
        self.left.sort(key=lambda each: changes(each, best))
        for _ in range(min(_BATCH, len(self.left))):
            self.tried += 1
            self._report(f"{self.tried} of {self.count} candidates, best {self.times[best]:.3f} ms with {best}")
            yield self.left.pop(0)

    def _usable(self, trial: Trial, way: Way) -> bool:
        try:
            if isinstance(way, Config):
                trial.compile(way)
            if _difference(trial.result(way), self._reference) > _TOLERANCE.get(self.problem.dtype, _ROUNDED):
                raise Rejected("wrong")
        except Rejected as error:
            self.skipped[str(error) if way != TORCH else f"{TORCH} {error}"] += 1
            return False
        return True

    def _compare(self, trial: Trial) -> None:
        """Times the best few, the rule's and torch's kernel once more; only these times are kept."""
        ways: list[Way] = list(dict.fromkeys([self.rule, *self._fastest(_FINALISTS)]))
        ways += [TORCH] if TORCH in self.times else []
        self._report(f"the last {len(ways)}")
        turn = 3e-3 * sum(self.times[way] for way in ways)  # seconds: a turn is three runs of each
        fits = int((self._deadline - self._clock()) / turn)
        turns = max(min(fits, _FINAL_TURNS), _LEAST_TURNS)
        self.times = dict(zip(ways, trial.milliseconds(ways, turns), strict=True))


def _labelled(report: Callable[[str], None], label: str, text: str) -> None:
    report(f"{label}: {text}")


def _difference(have: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    """The largest relative error (Frobenius) over the results; infinite where one is not finite."""
    worst = 0.0
    for a, b in zip(have, want, strict=True):
        error = float((a.float() - b.float()).norm() / b.float().norm().clamp_min(1e-30))
        worst = max(worst, error if error == error else float("inf"))
    return worst
