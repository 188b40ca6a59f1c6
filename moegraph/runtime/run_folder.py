"""The folder of a run: one run each, one process at a time. An earlier run in it goes on or is moved aside; it is never
overwritten."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from moegraph.checkpoint.names import CHECKPOINTS
from moegraph.errors import RunError
from moegraph.runtime.run_log import MANIFEST, METRICS
from moegraph.runtime.weights import WEIGHTS


@contextmanager
def claim_run_folder(folder: Path, note: Callable[[str], None], *, keep: bool = False) -> Iterator[Path]:
    """Makes `folder` for a new run, which has it for itself within; with `keep`, for the run that is in it.

    Without it, a folder that holds a run is renamed to `NAME.N` first. Raises `RunError` for a folder that holds
    anything else, that another process is training into, that is a file, or that cannot be written into.
    """
    try:
        if not keep:
            _move_earlier_run(folder, note)
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        lock = _lock(folder, note)
    except OSError as error:
        raise RunError(
            f"train.output_dir {folder} cannot be written to ({error.strerror or error}): choose another"
        ) from error
    try:
        yield folder
    finally:
        os.close(lock)


def _move_earlier_run(folder: Path, note: Callable[[str], None]) -> None:
    if not folder.is_dir():
        if folder.exists():
            raise RunError(f"train.output_dir {folder} is a file: choose another")
        return
    found = {path.name for path in folder.iterdir()}
    if not found:
        return
    if not found & {MANIFEST, METRICS, WEIGHTS, CHECKPOINTS}:
        raise RunError(f"train.output_dir {folder} holds files that are not a run's: choose another")
    if Path.cwd().is_relative_to(folder.resolve()):
        raise RunError(f"train.output_dir {folder} holds an earlier run and is where you are: choose another")
    os.close(_lock(folder, note))
    number = 1
    while os.path.lexists(aside := folder.with_name(f"{folder.name}.{number}")):
        number += 1
    folder.rename(aside)
    note(f"an earlier run was in {folder}; it is now {aside}")


def _lock(folder: Path, note: Callable[[str], None]) -> int:
    """An open handle of the folder that locks it for as long as it is open; the system closes it with the process."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise RunError(f"another process is training into train.output_dir {folder}: choose another") from None
    except OSError as error:  # a file system without locks
        note(f"train.output_dir {folder} cannot be locked ({error.strerror}): start no second run in it")
    return handle
