"""The folders of a run's checkpoints: which steps there are, and the renames by which one comes and goes.

Contract: `step-000120` is always whole. It is written as `step-000120.partial` and renamed; it goes by being renamed to
`step-000120.deleting` first. Where one of that step is there already, that one is `step-000120.replaced` until the new
one has its name, and counts as the step as long as there is no other. So whenever the process is killed, every step
that was complete can be found. All of it is the business of the run's first rank, which has locked the run's folder.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from moegraph.checkpoint.disk import partial_file, sync_folder, write_file
from moegraph.checkpoint.manifest import read_small_file
from moegraph.checkpoint.names import LATEST, parse_step, step_name
from moegraph.errors import CheckpointError

PARTIAL, REPLACED, DELETING, ABANDONED = ".partial", ".replaced", ".deleting", ".abandoned"


def complete_steps(root: Path) -> dict[int, Path]:
    """The steps in a folder of checkpoints, ascending; none where there is no such folder. Links are not followed.

    Raises CheckpointError if the folder is a link or a file, or cannot be read.
    """
    if root.is_symlink() or (root.exists() and not root.is_dir()):
        raise CheckpointError(f"{root} is not a folder of checkpoints: it is a link or a file; move it away")
    found: dict[int, Path] = {}
    try:
        entries = list(os.scandir(root)) if root.exists() else []
    except OSError as error:
        raise CheckpointError(f"{root} cannot be read: {error.strerror or error}") from error
    for entry in sorted(entries, key=lambda each: each.name):  # step-000120 comes before step-000120.replaced
        step = parse_step(entry.name.removesuffix(REPLACED))
        if step is not None and entry.is_dir(follow_symlinks=False):
            found.setdefault(step, root / entry.name)
    return dict(sorted(found.items()))


def newest(root: Path) -> Path | None:
    """The folder of the highest step, or None. `latest` says the same, unless a run ended between two renames."""
    steps = complete_steps(root)
    return steps[max(steps)] if steps else None


def read_latest(root: Path) -> str | None:
    """What `latest` says, if it says the name of a step."""
    try:
        text = read_small_file(root / LATEST, 64).decode("ascii", "replace").strip()
    except CheckpointError:
        return None
    return text if parse_step(text) is not None else None


def tidy(root: Path) -> None:
    """Removes what a process that was killed left behind, and gives a replaced step its name back. Raises OSError."""
    if not root.is_dir():
        return
    partial_file(root / LATEST).unlink(missing_ok=True)
    for path in sorted(root.iterdir()):
        name = path.name
        if parse_step(name.removesuffix(REPLACED)) is not None and name.endswith(REPLACED):
            whole = path.with_name(name.removesuffix(REPLACED))
            if not whole.exists():
                path.rename(whole)
                continue
        elif not any(parse_step(name.removesuffix(end)) is not None and name.endswith(end) for end in _LEFT_OVER):
            continue
        if not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)


_LEFT_OVER = (PARTIAL, DELETING)


def begin(root: Path, step: int) -> Path:
    """An empty folder to write a step into. Raises OSError."""
    root.mkdir(exist_ok=True)
    partial = root / f"{step_name(step)}{PARTIAL}"
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir()
    return partial


def publish(root: Path, step: int) -> Path:
    """The step that `begin` began is complete: it gets its name, then `latest` says so. Raises OSError."""
    target = root / step_name(step)
    partial, replaced = (target.with_name(f"{target.name}{end}") for end in (PARTIAL, REPLACED))
    sync_folder(partial)
    if target.exists():
        if replaced.exists():
            shutil.rmtree(replaced)
        target.rename(replaced)
    partial.rename(target)
    sync_folder(root)
    write_file(root / LATEST, f"{target.name}\n".encode())
    shutil.rmtree(replaced, ignore_errors=True)
    return target


def set_aside_after(root: Path, step: int) -> list[Path]:
    """Steps after `step` are of a future that will not come: they are renamed, never removed, the highest first.
    Raises OSError."""
    moved = []
    for later, path in sorted(complete_steps(root).items(), reverse=True):
        if later > step:
            number, aside = 1, root / f"{step_name(later)}{ABANDONED}"
            while os.path.lexists(aside):
                number += 1
                aside = root / f"{step_name(later)}{ABANDONED}.{number}"
            path.rename(aside)
            moved.append(aside)
    if moved:
        write_file(root / LATEST, f"{step_name(step)}\n".encode())
    return moved


def to_remove(steps: Iterable[int], keep_last: int, keep_every: int | None) -> list[int]:
    """Which steps go: all but the last `keep_last` and the multiples of `keep_every`."""
    ordered = sorted(steps)
    return [step for step in ordered[:-keep_last] if keep_every is None or step % keep_every]


def remove_old(root: Path, keep_last: int, keep_every: int | None, note: Callable[[str], None]) -> None:
    """Removes the steps that need not stay. What cannot be removed is said, and is no reason to stop."""
    steps = complete_steps(root)
    for step in to_remove(steps, keep_last, keep_every):
        going = root / f"{step_name(step)}{DELETING}"
        try:
            steps[step].rename(going)
            shutil.rmtree(going)
        except OSError as error:
            note(f"the old checkpoint {steps[step]} cannot be removed: {error.strerror or error}")


def discard(partial: Path) -> None:
    """Removes what was written of a step that failed."""
    with suppress(OSError):
        shutil.rmtree(partial)
