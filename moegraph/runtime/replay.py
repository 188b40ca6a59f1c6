"""Steps of a run once more, from a checkpoint, compared with the chain that the run left.

Nothing is written into the run's folder. Bits are equal only where they were to begin with: on the same kind of device,
with the same versions, layout and passes.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moegraph.checkpoint.run_checkpoints import RunCheckpoints
from moegraph.checkpoint.start import list_steps
from moegraph.compiled import Compiled
from moegraph.errors import CheckpointError, UsageError
from moegraph.runtime.audit import first_difference, read_chain, step_facts
from moegraph.runtime.compile_cache import compile_cache
from moegraph.runtime.device import choose_device, device_name, run_settings
from moegraph.runtime.mesh import check_world, join
from moegraph.runtime.progress import Progress
from moegraph.runtime.start import check_equal, together
from moegraph.runtime.trainer import Trainer
from moegraph.specs.schema import Spec


@dataclass(frozen=True)
class Replay:
    """How a replay ended: the step it began after, the steps compared, and the first that differs with what does."""

    start: int
    first: int
    last: int
    differs: int | None = None
    difference: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The outcome as JSON-able data."""
        return dict(self.__dict__)


def replay(
    spec: Spec,
    run: Path,
    steps: tuple[int, int],
    *,
    base: Path,
    progress: Progress,
    compiled: Compiled | None = None,
    rank: int = 0,
    world: int = 1,
) -> Replay:
    """Trains steps `steps[0]` to `steps[1]` of the run in the folder `run` again, as one rank, from the newest
    checkpoint before them, or from the start. Stops at the first step that differs. `compiled` saves compiling
    again what the caller has. Collective.

    Raises UsageError for steps that the chain does not have, CheckFailed where the chain itself is broken.
    """
    recorded = {line["step"]: line for line in read_chain(run) if "loss" in line}
    first, last = steps
    missing = next((step for step in range(first, last + 1) if step not in recorded), None)
    if missing is not None:
        known = f"{min(recorded)}:{max(recorded)}" if recorded else "none"
        raise UsageError(f"{run} has no step {missing} in its chain: there is {known}")
    start, checkpoint = _start_before(run, first)
    check_world(spec.layout, world)
    device = choose_device(spec.train.device)
    cache = compile_cache(device_name(device), inductor=spec.train.compile == "inductor")  # the kernels of the run
    with tempfile.TemporaryDirectory() as place, run_settings(spec.train.deterministic), cache, progress:
        if spec.train.non_finite == "dump":  # which would write
            spec = spec.model_copy(update={"train": spec.train.model_copy(update={"non_finite": "stop"})})
        with join(spec.layout, rank, world, device) as mesh:
            with together(mesh, "opening the data and compiling"):
                trainer = Trainer(spec, base, device, progress, compiled, mesh)
            check_equal(mesh, trainer.engine.compiled, trainer.dataset.fingerprint)
            engine, data = trainer.engine, trainer.dataset.fingerprint
            RunCheckpoints(engine, trainer.loader, data, Path(place), progress.note, trainer.policy).resume(checkpoint)
            for step in range(start + 1, last + 1):
                record = trainer.step(step)
                facts = step_facts(record, trainer.expert_counts, trainer.loader.step(step - 1).sample_ids)
                progress.show(record)
                found = first_difference(recorded[step], facts) if step in recorded else None
                if found is not None:
                    return Replay(start, first, last, step, found)
    return Replay(start, first, last)


def _start_before(run: Path, first: int) -> tuple[int, Path | None]:
    try:
        before = {step: path for step, path in list_steps(run).items() if step < first}
    except CheckpointError:
        before = {}
    return (max(before), before[max(before)]) if before else (0, None)
