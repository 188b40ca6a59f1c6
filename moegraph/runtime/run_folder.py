"""The folder of a run: one run each. An earlier run in it is moved aside, never overwritten."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from moegraph.errors import RunError
from moegraph.runtime.run_log import MANIFEST, METRICS
from moegraph.runtime.weights import WEIGHTS


def claim_run_folder(folder: Path, note: Callable[[str], None]) -> Path:
    """Makes `folder` for a new run. A folder that holds a run is renamed to `NAME.N` first; one that holds anything
    else, or a file in its place, is refused."""
    if folder.exists() and not folder.is_dir():
        raise RunError(f"train.output_dir {folder} is a file: choose another")
    found = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if found:
        if not found & {MANIFEST, METRICS, WEIGHTS}:
            raise RunError(f"train.output_dir {folder} holds files that are not a run's: choose another")
        number = 1
        while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
            number += 1
        folder.rename(aside)
        note(f"an earlier run was in {folder}; it is now {aside}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"train.output_dir {folder} cannot be made: {error}") from error
    return folder
