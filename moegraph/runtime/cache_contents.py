"""What lies in a compile cache is used only as it was when a run left it.

A compiler that is killed leaves half a library under its final name, and loading that ends the process that trusts it.
So a run that has compiled everything lists each file with its SHA-256, and the next run first removes every file that
is not in the list, or is not what the list says. Whatever is removed is compiled again.

Only the one user of a folder checks or lists; processes that share it at the same time use it as it is.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LISTING = "contents.json"


@contextmanager
def users_of(folder: Path) -> Iterator[Callable[[], bool]]:
    """Marks `folder` as used by this process within. Yields a function that says whether nobody else uses it."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:

        def alone() -> bool:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except OSError:
                return False
            finally:
                fcntl.flock(handle, fcntl.LOCK_SH)

        fcntl.flock(handle, fcntl.LOCK_SH)
        yield alone
    finally:
        os.close(handle)


def keep_contents(folder: Path) -> None:
    """Lists what lies in `folder` now."""
    listing = {str(path.relative_to(folder)): _sha256(path) for path in _files(folder)}
    handle, partial = tempfile.mkstemp(prefix=".", suffix=f".{LISTING}", dir=folder)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump(listing, file)
    os.replace(partial, folder / LISTING)


def remove_unknown(folder: Path) -> list[str]:
    """Removes every file that is not listed, or is not as it was listed, and returns their names."""
    try:
        listing = json.loads((folder / LISTING).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        listing = {}
    known = listing if isinstance(listing, dict) else {}
    removed = []
    for path in _files(folder):
        name = str(path.relative_to(folder))
        if known.get(name) != _sha256(path):
            path.unlink()
            removed.append(name)
    return removed


def _files(folder: Path) -> list[Path]:
    """Everything below that is not a folder and not the listing; links are not followed."""
    found = []
    for inside, _, names in os.walk(folder):
        found += [Path(inside, name) for name in names]
    return sorted(path for path in found if path != folder / LISTING)


def _sha256(path: Path) -> str:
    """The hash of a regular file; of anything else, and of what cannot be read, the empty string."""
    with suppress(OSError):
        if stat.S_ISREG(path.lstat().st_mode):
            with path.open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
    return ""
