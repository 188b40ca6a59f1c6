"""Small training runs for tests: a spec whose data is the `tokens` fixture, and what a run leaves behind."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from moegraph.compiled import Compiled
from moegraph.runtime.progress import Progress
from moegraph.runtime.run_log import read_records
from moegraph.runtime.trainer import Trainer, TrainResult, train
from moegraph.specs import Spec
from tests.small_models import CPU, small_spec


@dataclass(frozen=True)
class Run:
    """A finished run: its result, its records by step, its final weights and what it printed."""

    result: TrainResult
    records: list[dict[str, Any]]
    weights: dict[str, Tensor]
    printed: str

    def column(self, name: str) -> list[float]:
        """One number of every step's record."""
        return [record[name] for record in self.records if record["step"] > 0]


def run_spec(folder: Path, *overrides: str) -> Spec:
    """The small model on the `tokens` data, writing into `folder`/run."""
    return small_spec("data.source=tokens", "model.vocab_size=300", f"train.output_dir={folder / 'run'}", *overrides)


def run(spec: Spec, tokens: Path, compiled: Compiled | None = None) -> Run:
    """Trains `spec` and reads what it left."""
    stream = io.StringIO()
    result = train(spec, base=tokens, progress=Progress(spec.train.steps, stream=stream), compiled=compiled)
    weights = load_file(result.folder / "model.safetensors")
    return Run(result, read_records(result.folder), weights, stream.getvalue())


def trainer(spec: Spec, tokens: Path, compiled: Compiled | None = None) -> Trainer:
    """A trainer that has not begun, and says nothing."""
    return Trainer(spec, tokens, CPU, Progress(spec.train.steps, stream=io.StringIO()), compiled)
