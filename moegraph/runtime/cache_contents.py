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
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

LISTING = "contents.json"


Alone = Callable[[], AbstractContextManager[bool]]


@contextmanager
def users_of(folder: Path) -> Iterator[Alone]:
    """Marks `folder` as used by this process within. Yields a context manager that says whether nobody else uses it,
    and if so keeps others out until it is left."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)

    @contextmanager
    def alone() -> Iterator[bool]:
        mine = _lock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            yield mine
        finally:
            _lock(handle, fcntl.LOCK_SH)

    try:
        _lock(handle, fcntl.LOCK_SH)
        yield alone
    finally:
        os.close(handle)


def _lock(handle: int, kind: int) -> bool:
    """Whether the lock was taken. A file system without locks gives none, so nobody is ever known to be alone."""
    try:
        fcntl.flock(handle, kind)
    except OSError:
        return False
    return True


def keep_contents(folder: Path) -> None:
    """Lists what lies in `folder` now."""
    hashes = {str(path.relative_to(folder)): _sha256(path) for path in _files(folder)}
    listing = {name: sha256 for name, sha256 in hashes.items() if sha256 is not None}
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
        sha256 = _sha256(path)
        if sha256 is None or known.get(name) != sha256:
            path.unlink()
            removed.append(name)
    return removed


def _files(folder: Path) -> list[Path]:
    """Everything below that is not a folder and not the listing. A link is not followed."""
    found = []
    for inside, folders, names in os.walk(folder):
        links = [name for name in folders if Path(inside, name).is_symlink()]
        found += [Path(inside, name) for name in [*names, *links]]
    return sorted(path for path in found if path != folder / LISTING)


def _sha256(path: Path) -> str | None:
    """The hash of a regular file; None for anything else, and for what cannot be read."""
    with suppress(OSError):
        if stat.S_ISREG(path.lstat().st_mode):
            with path.open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
    return None
