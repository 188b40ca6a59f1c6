"""Which of several specs learns better: each trained with each seed, on the same tokens.

A seed sets initial values and the order of samples, so for one seed all specs see the same sequences in the same order.
What is compared is the validation loss after the last step, in nats per token.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from moegraph.compiled import compile
from moegraph.errors import UsageError
from moegraph.runtime.accounting import count_parameters
from moegraph.runtime.progress import Progress
from moegraph.runtime.trainer import train
from moegraph.specs.schema import Spec


@dataclass(frozen=True)
class Trained:
    """One run: the spec's name, its seed, and how it ended. Losses in nats per token, parameters active per token."""

    name: str
    seed: int
    active_parameters: int
    loss: float
    validation_loss: float
    seconds: float


@dataclass(frozen=True)
class Against:
    """The first spec against another one.

    `differences` by seed: validation loss of the first minus that of the other; negative where the first is better.
    """

    first: str
    other: str
    differences: Mapping[int, float]

    @property
    def mean(self) -> float:
        """Mean difference over the seeds."""
        return fmean(self.differences.values())

    @property
    def every_seed_agrees(self) -> bool:
        """Whether one of the two is better with every seed."""
        return all(d < 0 for d in self.differences.values()) or all(d > 0 for d in self.differences.values())

    def sentence(self) -> str:
        """What was found."""
        seeds = "1 seed" if len(self.differences) == 1 else f"{len(self.differences)} seeds"
        lower = sum(d < 0 for d in self.differences.values())
        low, high = min(self.differences.values()), max(self.differences.values())
        word = "below" if self.mean < 0 else "above"
        return (
            f"{self.first}: validation loss {abs(self.mean):.4f} nats {word} that of {self.other} on average "
            f"(differences {low:+.4f} to {high:+.4f}), lower with {lower} of {seeds}"
        )


@dataclass(frozen=True)
class Comparison:
    """Every run, and the first spec against each other one."""

    runs: tuple[Trained, ...]
    against: tuple[Against, ...]

    def to_json(self) -> dict[str, Any]:
        """The comparison as JSON-able data."""
        return {
            "runs": [vars(run) for run in self.runs],
            "against": [
                {
                    "first": each.first,
                    "other": each.other,
                    "differences": {str(seed): value for seed, value in each.differences.items()},
                    "mean": each.mean,
                    "every_seed_agrees": each.every_seed_agrees,
                }
                for each in self.against
            ],
        }


def compare(
    specs: Mapping[str, Spec],
    seeds: Sequence[int],
    *,
    base: Path,
    output: Path,
    report: Callable[[Trained], None] = lambda trained: None,
) -> Comparison:
    """Trains each of `specs`, by name, with each seed; the runs go to `output`/NAME-seed-N.

    `base` is the folder that `data.source` is relative to; `report` is told about each run when it ends.
    Raises `UsageError` for less than two specs, a seed given twice or none, a spec without validation, and specs that
    would not see the same tokens; and whatever `train` raises.
    """
    _check(specs, seeds)
    runs: list[Trained] = []
    for name, spec in specs.items():
        compiled = compile(spec)
        _, active = count_parameters(compiled.program)
        for seed in seeds:
            folder = str(output / f"{name}-seed-{seed}")
            own = spec.train.model_copy(update={"seed": seed, "output_dir": folder})
            anew = spec.checkpoint.model_copy(update={"resume": "off"})  # what is compared is trained here and now
            seeded = spec.model_copy(update={"train": own, "checkpoint": anew})
            with open(os.devnull, "w", encoding="utf-8") as nowhere:
                result = train(
                    seeded, base=base, progress=Progress(spec.train.steps, stream=nowhere), compiled=compiled
                )
            assert result.validation_loss is not None
            runs.append(Trained(name, seed, active, result.loss, result.validation_loss, result.seconds))
            report(runs[-1])
            torch.compiler.reset()  # a run's compiled graphs end with it
    losses = {(run.name, run.seed): run.validation_loss for run in runs}
    first, *others = specs
    against = (Against(first, o, {seed: losses[first, seed] - losses[o, seed] for seed in seeds}) for o in others)
    return Comparison(tuple(runs), tuple(against))


def _check(specs: Mapping[str, Spec], seeds: Sequence[int]) -> None:
    if len(specs) < 2:
        raise UsageError("a comparison needs at least two specs")
    if not seeds or len(set(seeds)) != len(seeds) or min(seeds) < 0:
        raise UsageError(f"seeds {', '.join(map(str, seeds)) or '(none)'}: give each one once, from 0 up")
    (first, reference), *others = specs.items()
    for name, spec in specs.items():
        if spec.train.validation is None:
            raise UsageError(f"{name} has no train.validation, and its validation loss is what is compared")
    for name, spec in others:
        for path in _SAME:
            a, b = _value(reference, path), _value(spec, path)
            if a != b:
                raise UsageError(f"{first} and {name} would not see the same tokens: {path} is {a} and {b}")


_SAME = (
    "data.source",
    "data.seq_len",
    "data.document_mask",
    "train.steps",
    "train.tokens_per_step",
    "train.validation.sequences",
)


def _value(spec: Spec, path: str) -> Any:
    value: Any = spec
    for part in path.split("."):
        value = getattr(value, part)
    return value
