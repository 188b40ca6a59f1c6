"""The checkpoints of one run, as its loop sees them: what it starts from, and what it leaves behind."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from moegraph.checkpoint.names import CHECKPOINTS, parse_step
from moegraph.checkpoint.reader import Checkpoint
from moegraph.checkpoint.restore import restore
from moegraph.checkpoint.same_run import check_same_run
from moegraph.checkpoint.saver import Saver
from moegraph.checkpoint.start import is_within
from moegraph.checkpoint.step_folders import complete_steps, set_aside_after
from moegraph.data.loader import Loader
from moegraph.errors import CheckpointError
from moegraph.runtime.engine import Engine
from moegraph.runtime.manifest import versions
from moegraph.runtime.mesh import Mesh
from moegraph.runtime.start import together
from moegraph.runtime.step_policy import StepPolicy

_NUMBERS = ("loss", "loss_total", "balance_loss", "z_loss", "grad_norm", "lr", "valid_targets")


class RunCheckpoints:
    """`data_fingerprint`: of the training data. `note` is told, on the first rank, what was saved and resumed. `policy`
    counts skipped steps, and goes on counting after a resume."""

    def __init__(
        self,
        engine: Engine,
        loader: Loader,
        data_fingerprint: str,
        run_folder: Path,
        note: Callable[[str], None],
        policy: StepPolicy | None = None,
    ) -> None:
        self.spec, self.engine, self.mesh = engine.spec, engine, engine.mesh
        self.options, self.note = engine.spec.checkpoint, note
        self._loader, self._fingerprint, self._folder = loader, data_fingerprint, run_folder
        self._run = uuid.uuid4().hex
        self.policy = policy if policy is not None else StepPolicy(engine.spec.train)
        self._versions: dict[str, str] = {}
        self.digest: str | None = None  # of the audit chain, at the step that is saved or was resumed from; rank 0
        self.loss = 0.0  # of the step that was resumed from
        self.saver = Saver(self.options, run_folder, engine, note)

    def resume(self, start: Path | None) -> int:
        """Loads the checkpoint that the first rank names, and returns its step; 0 without one. Collective.

        Each rank hashes its share of the files while it reads what it keeps. Raises CheckpointError, on all ranks, if
        anything is wrong; nothing has then been changed on disk, and the state is not to be used.
        """
        folder = broadcast_path(self.mesh, start)
        if folder is None:
            return 0
        with together(self.mesh, "opening the checkpoint"), _naming_the_one_before(folder):
            checkpoint = Checkpoint.open(folder)
            manifest = checkpoint.manifest
            changed = check_same_run(folder, manifest, self.spec, self._fingerprint)
        files = list(manifest.files)[self.mesh.rank :: self.mesh.world] if self.options.verify else []
        with together(self.mesh, "loading the checkpoint"), _naming_the_one_before(folder):
            restore(self.engine, checkpoint, files)
        with together(self.mesh, "setting later checkpoints aside"):
            if self.mesh.rank == 0 and is_within(folder, self._folder):
                self._set_aside_after(manifest.step)
        self.engine.state.refresh()
        loss = manifest.numbers.loss
        self._run, self.loss = manifest.run, loss if loss is not None else math.nan
        self.digest = manifest.audit
        counters, accepted = manifest.counters, manifest.accepted
        self.policy.resume(counters.skipped_steps, counters.skipped_in_a_row, accepted.losses, accepted.norms)
        self.note(f"resumed from {folder}, step {manifest.step}" + "".join(f"\n    {each}" for each in changed))
        return manifest.step

    def after_step(
        self, step: int, record: Mapping[str, Any], expert_counts: Sequence[Sequence[int]], *, now: bool = False
    ) -> None:
        """Completes a checkpoint that was in flight, and saves one if it is due, or wanted `now`. Collective.

        Raises CheckpointError if writing failed, now or in the background.
        """
        self.saver.poll()
        every = self.options.every
        if now or (every is not None and (step % every == 0 or step == self.spec.train.steps)):
            self.save(step, record, expert_counts)

    def save(self, step: int, record: Mapping[str, Any], expert_counts: Sequence[Sequence[int]]) -> None:
        """Saves a checkpoint of this step now. `record` is what it reported, `expert_counts` its choices [L][E].
        Collective."""
        self.saver.save(step, self._content(step, record, expert_counts) if self.mesh.rank == 0 else {})

    def finish(self) -> None:
        """Waits for a checkpoint in flight. Collective."""
        self.saver.finish()

    def __enter__(self) -> RunCheckpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """The run has ended. Nothing writes any more, unless by Ctrl-C, which waits for nothing."""
        if error is None or isinstance(error, Exception):
            self.saver.abandon()

    def _set_aside_after(self, step: int) -> None:
        root = self._folder / CHECKPOINTS
        try:
            for path in set_aside_after(root, step):
                self.note(f"a later checkpoint, of steps that are trained again now, is now {path}")
        except OSError as error:
            raise CheckpointError(f"{root} cannot be written to ({error.strerror or error})") from error

    def _content(self, step: int, record: Mapping[str, Any], expert_counts: Sequence[Sequence[int]]) -> dict[str, Any]:
        """What the manifest says of a step, besides tensors and files."""
        layout, samples = self.spec.layout, step * self._loader.sequences_per_step
        self._versions = self._versions or versions()
        return {
            "run": self._run,
            "step": step,
            "saved": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "layout": {"dp": layout.dp, "ep": layout.ep, "pp": layout.pp, "schedule": layout.schedule},
            "data": {
                "fingerprint": self._fingerprint,
                "seed": self.spec.train.seed,
                "samples": samples,
                "epoch": samples // self._loader.num_samples,
            },
            "counters": {
                "optimizer_steps": self.engine.state.optimizer.steps,
                "replays": self.engine.replays,
                "capacity": self.engine.capacity,
                "skipped_steps": self.policy.skipped,
                "skipped_in_a_row": self.policy.in_a_row,
            },
            "accepted": {"losses": list(self.policy.losses), "norms": list(self.policy.norms)},
            "audit": self.digest,
            "numbers": {
                **{name: record[name] if math.isfinite(record[name]) else None for name in _NUMBERS},
                "expert_counts": [list(row) for row in expert_counts],
            },
            "spec": self.spec.model_dump(mode="json", by_alias=True),
            "graph_hashes": dict(self.engine.compiled.hashes),
            "versions": self._versions,
        }


@contextmanager
def _naming_the_one_before(folder: Path) -> Iterator[None]:
    """Adds to the error of a damaged checkpoint which one there is before it. Nothing else is chosen silently."""
    try:
        yield
    except CheckpointError as error:
        step = parse_step(folder.name)
        if error.exit_code != 1 or step is None:
            raise
        before = {n: path for n, path in complete_steps(folder.parent).items() if n < step}
        if not before:
            raise
        n = max(before)
        text = f"{error}\n    fix: go on from step {n} with --set checkpoint.resume={before[n]}"
        raise CheckpointError(text) from error


def broadcast_path(mesh: Mesh, path: Path | None) -> Path | None:
    """The first rank's path, on all ranks."""
    if mesh.world == 1:
        return path
    text = list(str(path.absolute()).encode("utf-8", "surrogateescape")) if path is not None else []
    size = torch.tensor(len(text), dtype=torch.int64)
    dist.broadcast(size, src=0)
    content = torch.tensor(text if mesh.rank == 0 else [0] * int(size), dtype=torch.uint8)
    if size:
        dist.broadcast(content, src=0)
    found = bytes(content.tolist()).decode("utf-8", "surrogateescape")
    return Path(found) if found else None
