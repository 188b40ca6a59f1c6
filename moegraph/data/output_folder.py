"""Write a folder aside and rename it into place, so that no reader and no Ctrl-C ever meets half of one.

Contract: inside `with new_folder(target, force=…) as partial`, write into `partial`, a fresh folder beside the target.
When the block ends, `partial` becomes the target in one rename; when it raises, `partial` is removed and the target is
as it was. An existing target is replaced only with `force`, and only if it holds nothing but prepared data.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moegraph.errors import DataError

_PREPARED_NAME = re.compile(r"(manifest|tokenizer)\.json|(train|validation)-\d{5,}\.(tokens|offsets)\.bin")


@contextmanager
def new_folder(target: Path, *, force: bool = False) -> Iterator[Path]:
    """Yield an empty folder that becomes `target` when the block ends well. Raises DataError if it may not."""
    check_replaceable(target, force=force)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.parent))
    except OSError as error:
        raise DataError(f"{target} cannot be written: {error.strerror or error}") from error
    try:
        yield partial
        partial.chmod(0o777 & ~_umask())
        _sync_folder(partial)
        check_replaceable(target, force=force)
        move_into_place(partial, target)
    except OSError as error:
        raise DataError(f"{target} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def check_replaceable(target: Path, *, force: bool) -> None:
    """Raise DataError unless `target` is absent, an empty folder, or (with `force`) a folder of prepared data."""
    if target.is_dir() and not target.is_symlink():
        names = sorted(entry.name for entry in target.iterdir())
        foreign = [name for name in names if not _PREPARED_NAME.fullmatch(name)]
        if foreign:
            raise DataError(
                f"{target} holds {foreign[0]!r}, which is not prepared data: choose another output folder", exit_code=2
            )
        if names and not force:
            raise DataError(
                f"{target} already holds other data: choose another output folder, or pass --force", exit_code=2
            )
    elif target.exists() or target.is_symlink():
        raise DataError(f"{target} exists and is not a folder: choose another output folder", exit_code=2)


def move_into_place(partial: Path, target: Path) -> None:
    """`partial` becomes `target`, on disk when this returns. A folder that is there is moved out of the way first, and
    back if the move fails. Raises OSError."""
    if target.is_dir() and any(target.iterdir()):
        replaced = Path(tempfile.mkdtemp(prefix=f".{target.name}.replaced-", dir=target.parent))
        target.rename(replaced)
        try:
            partial.rename(target)
        except BaseException:
            replaced.rename(target)
            raise
        shutil.rmtree(replaced)
    else:
        partial.rename(target)
    _sync_folder(target.parent)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
