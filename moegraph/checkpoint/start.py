"""Where a run starts from: a checkpoint in its own folder, one elsewhere, or nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from moegraph.checkpoint.names import CHECKPOINTS, parse_step
from moegraph.checkpoint.step_folders import complete_steps, newest, tidy
from moegraph.errors import CheckpointError
from moegraph.runtime.run_folder import claim_run_folder

AUTO, OFF = "auto", "off"


def find_checkpoint(path: Path) -> Path:
    """The folder of a checkpoint that a path means: its own, or that of a run, whose newest it is.

    Raises CheckpointError (exit status 2) where there is none.
    """
    for root in (path / CHECKPOINTS, path):
        found = newest(root)
        if found is not None:
            return found
    named_so = parse_step(path.name.partition(".")[0]) is not None
    if path.is_dir() and (named_so or any(path.glob("shard-*.safetensors"))):
        return path
    raise CheckpointError(
        f"{path} holds no checkpoint: name a run's folder, or one of its {CHECKPOINTS}/step-…", exit_code=2
    )


def find_start(resume: str, output: Path) -> Path | None:
    """The checkpoint that `checkpoint.resume` asks for: None for `off`, and for `auto` without a checkpoint."""
    if resume == OFF:
        return None
    if resume == AUTO:
        return newest(output / CHECKPOINTS)
    return find_checkpoint(Path(resume))


def is_within(checkpoint: Path, run_folder: Path) -> bool:
    """Whether a checkpoint is one of this run's."""
    return checkpoint.resolve().parent == (run_folder / CHECKPOINTS).resolve()


@contextmanager
def claim_with_start(resume: str, output: Path, note: Callable[[str], None]) -> Iterator[Path | None]:
    """Claims the folder of a run and gives the checkpoint that it starts from.

    A run that starts from one of its own goes on in its folder; any other is moved aside, as `claim_run_folder` says.
    """
    start = find_start(resume, output)
    keep = start is not None and is_within(start, output)
    with claim_run_folder(output, note, keep=keep):
        if keep:
            root = output / CHECKPOINTS
            try:
                tidy(root)
            except OSError as error:
                raise CheckpointError(f"{root} cannot be written to ({error.strerror or error})") from error
            start = find_start(resume, output)
        yield start


def list_steps(path: Path) -> dict[int, Path]:
    """The checkpoints of a run, given its folder or that of its checkpoints. Raises CheckpointError (exit status 2)
    where there is neither."""
    for root in (path / CHECKPOINTS, path):
        found = complete_steps(root)
        if found or (root != path and root.is_dir()):
            return found
    raise CheckpointError(f"{path} is not the folder of a run with checkpoints", exit_code=2)
