"""Where compiled kernels are kept: in the user's own cache folder, under a key that names everything they depend on.

A compile cache is code. Its folder belongs to this user alone (mode 0700, owner checked), is refused inside a run, a
compiled directory or a checkpoint, and its name is a hash of moegraph's sources, of the Python, torch and Triton
versions and of the device: Inductor's own key does not know about our operators, and a stale artifact once dropped a
collective. What lies in it is used only as it was when a run left it (`cache_contents`): a file torn by a killed run is
compiled again.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import resources
from pathlib import Path

import torch

from moegraph._torch_compat import inductor_headers_in
from moegraph.artifact_names import REPORT_NAME, SPEC_NAME
from moegraph.checkpoint.names import MANIFEST, parse_step
from moegraph.errors import RunError
from moegraph.runtime.cache_contents import keep_contents, remove_unknown, users_of
from moegraph.runtime.manifest import versions
from moegraph.runtime.run_log import METRICS
from moegraph.user_cache import user_cache

_INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"  # the one way torch offers to choose the folder
_TRITON = "TRITON_CACHE_DIR"
_HEADERS = "headers"
_PACKAGES = ("moegraph", "moegraph.passes", "moegraph.kernels", "moegraph.specs")
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def cache_folder(device_name: str) -> Path:
    """The folder for artifacts of this source tree, these versions and this device; made private to this user.

    Raises `RunError` if it cannot be made, if it or the folder above is a link or another user's, or if others could
    have written into it.
    """
    return _private_folder(_key(device_name))


@contextmanager
def compile_cache(
    device_name: str, *, inductor: bool = True, note: Callable[[str], None] = lambda text: None
) -> Iterator[Callable[[], None]]:
    """Compilers started inside keep their artifacts in `cache_folder(device_name)`, and with `inductor` the C++ headers
    that all kernels share in a folder beside it: they depend on torch and the C++ compiler, and their name says so.

    Yields a function to call when everything has been compiled; what is there then is what a later run may use. It is
    called at a normal end too. What a run leaves that was stopped before that is compiled again. `note` is told what
    was removed.
    """
    folder = cache_folder(device_name)
    with ExitStack() as stack:
        keeps = [stack.enter_context(_trusted(folder, note))]
        stack.enter_context(_environment({_INDUCTOR: str(folder / "inductor"), _TRITON: str(folder / "triton")}))
        if inductor:
            headers = _private_folder(_HEADERS)
            keeps.append(stack.enter_context(_trusted(headers, note)))
            stack.enter_context(inductor_headers_in(headers))

        def keep() -> None:
            for each in keeps:
                each()

        yield keep
        keep()


@contextmanager
def _trusted(folder: Path, note: Callable[[str], None]) -> Iterator[Callable[[], None]]:
    """Removes what no run left in `folder` so. Yields a function that lists what is there as what a run left."""
    with users_of(folder) as alone:
        with alone() as mine:
            removed = remove_unknown(folder) if mine else []
        if removed:
            shown = ", ".join(removed[:3]) + (f" and {len(removed) - 3} more" if len(removed) > 3 else "")
            what = "is not as a run left it" if len(removed) == 1 else "are not as a run left them"
            note(f"compile cache: {shown} in {folder} {what}: removed, and compiled again")

        def keep() -> None:
            with alone() as mine:
                if mine:
                    keep_contents(folder)

        yield keep


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _private_folder(name: str) -> Path:
    root = user_cache() / "compiled"
    _check_outside(root)
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        for part in (root, root / name):
            part.mkdir(mode=0o700, exist_ok=True)
            _make_private(part)
    except OSError as error:
        raise RunError(
            f"the compile cache {root / name} cannot be made: {error.strerror or error}; make {root.parents[1]} "
            "writable, or set XDG_CACHE_HOME to a folder of yours"
        ) from error
    return root / name


def _check_outside(root: Path) -> None:
    """A run, a compiled directory and a checkpoint are data, which people copy and share; what is run from a cache is
    not."""
    for folder in (root.resolve(), *root.resolve().parents):
        what = next((what for what, names in _DATA.items() if all((folder / name).exists() for name in names)), None)
        if parse_step(folder.name) is not None and (folder / MANIFEST).exists():
            what = "a checkpoint"
        if what is not None:
            raise RunError(
                f"the compile cache {root} lies inside {what}, {folder}: set XDG_CACHE_HOME to a folder elsewhere"
            )


_DATA = {"a run": (METRICS, MANIFEST), "a compiled directory": (REPORT_NAME, SPEC_NAME)}  # files that tell each


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
