"""Where compiled kernels are kept: in the user's own cache folder, under a key that names everything they depend on.

A compile cache is code. Its folder belongs to this user alone (mode 0700, owner checked), is never inside a run or a
compiled directory, and its name is a hash of moegraph's sources, of the Python, torch and Triton versions and of the
device: Inductor's own key does not know about our operators, and a stale artifact once dropped a collective.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path

from moegraph.errors import RunError
from moegraph.runtime.manifest import versions

_INDUCTOR_FOLDER = "TORCHINDUCTOR_CACHE_DIR"  # the one way torch offers to choose the folder
_TRITON_FOLDER = "TRITON_CACHE_DIR"
_PACKAGES = ("moegraph", "moegraph.passes", "moegraph.kernels", "moegraph.specs")


def cache_folder(device_name: str) -> Path:
    """The folder for artifacts of this source tree, these versions and this device; made private to this user."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moegraph" / "compiled"
    folder = root / _key(device_name)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for part in (root, folder):
        found = part.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise RunError(f"the compile cache {part} is not a folder of this user: remove it, it will be made anew")
        if stat.S_IMODE(found.st_mode) != 0o700:
            part.chmod(0o700)
    return folder


@contextmanager
def compile_cache(device_name: str) -> Iterator[Path]:
    """Compilers started inside keep their artifacts in `cache_folder(device_name)`."""
    folder = cache_folder(device_name)
    before = {name: os.environ.get(name) for name in (_INDUCTOR_FOLDER, _TRITON_FOLDER)}
    os.environ[_INDUCTOR_FOLDER] = str(folder / "inductor")
    os.environ[_TRITON_FOLDER] = str(folder / "triton")
    try:
        yield folder
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _key(device_name: str) -> str:
    digest = hashlib.sha256()
    for name, version in sorted(versions().items()):
        digest.update(f"{name} {version}\n".encode())
    digest.update(device_name.encode())
    for package in _PACKAGES:
        for path in sorted(_sources(Path(str(resources.files(package))))):
            digest.update(path.name.encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:24]


def _sources(folder: Path) -> Iterator[Path]:
    yield from folder.rglob("*.py")
