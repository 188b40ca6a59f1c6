"""Where compiled kernels are kept: in the user's own cache folder, under a key that names everything they depend on.

A compile cache is code. Its folder belongs to this user alone (mode 0700, owner checked), is never inside a run or a
compiled directory, and its name is a hash of moegraph's sources, of the Python, torch and Triton versions and of the
device: Inductor's own key does not know about our operators, and a stale artifact once dropped a collective. What lies
in it is used only as it was when a run left it (`cache_contents`): a file torn by a killed run is compiled again.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path

import torch

from moegraph.errors import RunError
from moegraph.runtime.cache_contents import keep_contents, remove_unknown, users_of
from moegraph.runtime.manifest import versions

_INDUCTOR_FOLDER = "TORCHINDUCTOR_CACHE_DIR"  # the one way torch offers to choose the folder
_TRITON_FOLDER = "TRITON_CACHE_DIR"
_PACKAGES = ("moegraph", "moegraph.passes", "moegraph.kernels", "moegraph.specs")
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def cache_folder(device_name: str) -> Path:
    """The folder for artifacts of this source tree, these versions and this device; made private to this user.

    Raises `RunError` if it cannot be made, if it or the folder above is a link or another user's, or if others could
    have written into it.
    """
    named = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(named) if os.path.isabs(named) else Path.home() / ".cache"
    root = base / "moegraph" / "compiled"
    folder = root / _key(device_name)
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        for part in (root, folder):
            part.mkdir(mode=0o700, exist_ok=True)
            _make_private(part)
    except OSError as error:
        raise RunError(
            f"the compile cache {folder} cannot be made: {error.strerror or error}; make {base} writable, "
            "or set XDG_CACHE_HOME to a folder of yours"
        ) from error
    return folder


@contextmanager
def compile_cache(device_name: str) -> Iterator[Callable[[], None]]:
    """Compilers started inside keep their artifacts in `cache_folder(device_name)`.

    Yields a function to call when everything has been compiled; what is there then is what a later run may use. It is
    called at a normal end too. What a run leaves that was stopped before that is compiled again.
    """
    folder = cache_folder(device_name)
    with users_of(folder) as alone:
        with alone() as mine:
            if mine:
                remove_unknown(folder)
        before = {name: os.environ.get(name) for name in (_INDUCTOR_FOLDER, _TRITON_FOLDER)}
        os.environ[_INDUCTOR_FOLDER] = str(folder / "inductor")
        os.environ[_TRITON_FOLDER] = str(folder / "triton")

        def keep() -> None:
            with alone() as mine:
                if mine:
                    keep_contents(folder)

        try:
            yield keep
            keep()
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def _make_private(folder: Path) -> None:
    found = folder.lstat()
    remedy = f"remove it (`rm -r {folder}`), and it will be made anew"
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise RunError(f"the compile cache {folder} is not a folder of this user: {remedy}")
    if found.st_mode & _WRITABLE_BY_OTHERS:
        raise RunError(f"others can write into the compile cache {folder}, and what it holds is run: {remedy}")
    if stat.S_IMODE(found.st_mode) != 0o700:
        folder.chmod(0o700)


def _key(device_name: str) -> str:
    digest = hashlib.sha256()
    for name, version in sorted(versions().items()):
        digest.update(f"{name} {version}\n".encode())
    # Kernels for the CPU are written for its vector instructions, and a home folder may serve several machines.
    digest.update(f"{device_name} {torch.backends.cpu.get_cpu_capability()}\n".encode())
    for package in _PACKAGES:
        folder = Path(str(resources.files(package)))
        for path in sorted(folder.rglob("*.py")):
            source = path.read_bytes()
            digest.update(f"{package} {path.relative_to(folder)} {len(source)}\n".encode())
            digest.update(source)
    return digest.hexdigest()[:24]
