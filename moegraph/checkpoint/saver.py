"""Saves checkpoints of a run on all its ranks together.

    save(step):  [wait for the previous one] → rank 0 makes step-N.partial → every rank writes its shard → poll
    poll():      all shards are on disk? → rank 0 writes the manifest, renames the folder, moves `latest`, removes old

Contract: never two in flight. Collectives run on the calling thread only, at the same places on all ranks; whatever
goes wrong on one of them, in the background or not, raises CheckpointError there at the next `poll`, and RunError on
the others. What was complete before stays complete.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moegraph.checkpoint import step_folders
from moegraph.checkpoint.disk import free_bytes, sync_folder, write_file
from moegraph.checkpoint.manifest import manifest_json
from moegraph.checkpoint.names import CHECKPOINTS, MANIFEST, shard_name, step_name
from moegraph.checkpoint.rank_tensors import owned_tensors, whole_tensors
from moegraph.checkpoint.shard_writer import HostCopy, Job, Written
from moegraph.errors import CheckpointError
from moegraph.runtime.collectives import during
from moegraph.runtime.engine import Engine
from moegraph.runtime.start import together
from moegraph.specs.schema.run import Checkpoint

_MARGIN = 1 << 20  # bytes of manifest and headers


class Saver:
    """Writes into `run_folder`/checkpoints. `note` is told, on the first rank, about each checkpoint."""

    def __init__(self, options: Checkpoint, run_folder: Path, engine: Engine, note: Callable[[str], None]) -> None:
        self.options, self.engine, self.mesh, self.note = options, engine, engine.mesh, note
        self.root = run_folder / CHECKPOINTS
        self._copy = HostCopy()
        engine.before_commit = self._copy.hold
        self._job: Job | None = None
        self._step = 0
        self._content: dict[str, Any] = {}

    def save(self, step: int, content: dict[str, Any]) -> None:
        """Saves the state as it is now; `content` is what the manifest says of it, on rank 0. Collective.

        With `mode: async` it returns when the state has been copied to host memory; from a GPU, at once, and the next
        commit waits for the copy.
        """
        self.finish()
        self._step, self._content = step, content
        tensors = owned_tensors(self.engine.state, self.engine.program, self.mesh)
        size = torch.tensor(sum(tensor.nbytes for tensor in tensors.values()), dtype=torch.int64)
        if self.mesh.world > 1:
            with during("agreeing on a checkpoint"):
                dist.all_reduce(size)
        with self._together("beginning"):
            if self.mesh.rank == 0:
                self._begin(int(size))
        background = self.options.mode == "async"
        if background or self.engine.device.type != "cpu":
            tensors = self._copy.begin(tensors)
        path = self._partial / shard_name(self.mesh.rank, self.mesh.world)
        self._job = Job(path, tensors, background=background, ready=self._copy.wait)
        if not background:
            self.finish()

    def poll(self) -> None:
        """Completes the checkpoint in flight if all its shards are written. Collective; cheap when none is."""
        if self._job is None:
            return
        waiting = torch.tensor(not self._job.done, dtype=torch.int64)
        if self.mesh.world > 1:
            with during("agreeing on a checkpoint"):
                dist.all_reduce(waiting)
        if not waiting:
            self.finish()

    def finish(self) -> None:
        """Waits for the checkpoint in flight and completes it. Collective."""
        if self._job is None:
            return
        job, self._job = self._job, None
        job.wait()
        try:
            with self._together("writing"):
                if job.error is not None:
                    raise job.error
            assert job.written is not None
            files = self._gather(job.written)
            with self._together("completing"):
                if self.mesh.rank == 0:
                    self._complete(files)
        except BaseException:
            if self.mesh.rank == 0:
                step_folders.discard(self._partial)
            raise

    def abandon(self) -> None:
        """The run ends by an error: nothing writes any more when this returns. The rest is tidied at the next start."""
        if self._job is not None:
            self._job.wait()
            self._job = None

    @property
    def _partial(self) -> Path:
        return self.root / f"{step_name(self._step)}{step_folders.PARTIAL}"

    def _begin(self, size: int) -> None:
        if not self.root.is_dir():
            self.root.mkdir()
            sync_folder(self.root.parent)
        free = free_bytes(self.root)
        if free < size + _MARGIN:
            raise CheckpointError(
                f"step {self._step}: a checkpoint needs {_mebibytes(size + _MARGIN)} and {self.root} has "
                f"{_mebibytes(free)} free: free some space, or keep fewer (checkpoint.keep_last)"
            )
        step_folders.begin(self.root, self._step)

    def _complete(self, files: dict[str, Written]) -> None:
        for name, each in files.items():
            path = self._partial / name
            if not path.is_file() or path.stat().st_size != each.bytes:
                raise CheckpointError(
                    f"step {self._step}: {path} is not what its rank wrote, seen from rank 0: all ranks need one file "
                    "system for train.output_dir"
                )
        tensors = whole_tensors(self.engine.program, self.engine.spec)
        content = {
            **self._content,
            "tensors": {name: entry.model_dump() for name, entry in tensors.items()},
            "files": {name: {"bytes": each.bytes, "sha256": each.sha256} for name, each in files.items()},
        }
        write_file(self._partial / MANIFEST, manifest_json(content))
        target = step_folders.publish(self.root, self._step)
        self.note(f"checkpoint: {target}, {_mebibytes(sum(each.bytes for each in files.values()))}")
        step_folders.remove_old(self.root, self.options.keep_last, self.options.keep_every, self.note)

    def _gather(self, written: Written) -> dict[str, Written]:
        """What every rank wrote, by file."""
        mine = torch.tensor([written.bytes, *bytes.fromhex(written.sha256)], dtype=torch.int64)
        every = [mine]
        if self.mesh.world > 1:
            every = [torch.empty_like(mine) for _ in range(self.mesh.world)]
            with during("agreeing on a checkpoint"):
                dist.all_gather(every, mine)
        rows = [row.tolist() for row in every]
        return {shard_name(r, self.mesh.world): Written(size, bytes(sha).hex()) for r, (size, *sha) in enumerate(rows)}

    @contextmanager
    def _together(self, doing: str) -> Iterator[None]:
        """As `together`; an OSError becomes a sentence first."""
        what = f"{doing} the checkpoint of step {self._step}"
        with during(what), together(self.mesh, what):
            try:
                yield
            except OSError as error:
                raise self._said(error) from error

    def _said(self, error: OSError) -> CheckpointError:
        reason = os.strerror(error.errno) if error.errno else str(error)
        return CheckpointError(
            f"step {self._step}: the checkpoint could not be written to {self.root} ({reason}); those of earlier steps "
            "are whole"
        )


def _mebibytes(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
