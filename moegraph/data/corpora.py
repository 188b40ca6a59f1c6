"""Built-in corpora, and what `data.source` of a spec means.

`python-stdlib` is the source of the running Python's own standard library: about 12 MB that is on every machine. A
prepared corpus lies in the user's cache folder (`$XDG_CACHE_HOME`, else `~/.cache`) under
`moegraph/corpora/NAME-KEY/`, where KEY is a hash of the documents and of the settings: another Python version gives
another folder, never other data under the same name.
"""

from __future__ import annotations

import difflib
import os
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

from moegraph.data.manifest import MANIFEST_NAME, Inputs
from moegraph.data.sources import Document, documents_digest
from moegraph.errors import DataError
from moegraph.specs.schema.run import CORPUS_PREFIX
from moegraph.user_cache import user_cache

# Tests, installed packages, and folders named after a build configuration differ from machine to machine.
_LEFT_OUT_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
_LEFT_OUT_PREFIXES = ("config-", "_sysconfigdata", "sitecustomize", "usercustomize")


def python_stdlib(root: Path | None = None) -> Iterator[Document]:
    """The `.py` files of the standard library, ordered by relative path, each one a document named by that path.

    Left out: tests, installed packages, files generated for one machine, and files that are not UTF-8.
    """
    base = Path(sysconfig.get_path("stdlib")) if root is None else root
    files: list[tuple[str, Path]] = []
    for folder, subfolders, names in os.walk(base):
        subfolders[:] = [
            name for name in subfolders if name not in _LEFT_OUT_FOLDERS and not name.startswith(_LEFT_OUT_PREFIXES)
        ]
        for name in names:
            if name.endswith(".py") and not name.startswith(_LEFT_OUT_PREFIXES):
                path = Path(folder, name)
                files.append((path.relative_to(base).as_posix(), path))
    for relative, path in sorted(files):
        try:
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue
        except OSError as error:
            raise DataError(f"{path} of the standard library cannot be read: {error.strerror}") from error
        yield Document(text, relative)


CORPORA: dict[str, Callable[[], Iterator[Document]]] = {"python-stdlib": python_stdlib}


def corpus_documents(name: str) -> Iterator[Document]:
    """The documents of a built-in corpus. Raises DataError, with the known names, for any other name."""
    if name not in CORPORA:
        near = difflib.get_close_matches(name, CORPORA, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise DataError(f"there is no built-in corpus {name!r}; known: {', '.join(sorted(CORPORA))}{hint}", exit_code=2)
    return CORPORA[name]()


def corpus_folder(name: str, inputs: Inputs) -> Path:
    """Where the built-in corpus `name`, prepared with `inputs`, lies in the user's cache folder."""
    return _cache_root() / f"{name}-{inputs.key()[:16]}"


def resolve_source(source: str, base: Path) -> Path:
    """The folder of token shards that `data.source` names.

    `corpus:NAME` is the built-in corpus, prepared with the default settings. Anything else is a path relative to
    `base`; what a spec file may name is checked when the spec is loaded. Raises DataError, with the command to run,
    when the folder was never prepared.
    """
    if source.startswith(CORPUS_PREFIX):
        name = source.removeprefix(CORPUS_PREFIX)
        folder = corpus_folder(name, Inputs(documents_sha256=documents_digest(corpus_documents(name))))
        if not (folder / MANIFEST_NAME).is_file():
            raise DataError(
                f"corpus {name!r} of this Python is not prepared yet: run `moegraph data prepare --corpus {name}`"
            )
        return folder
    if "\0" in source:
        raise DataError("data.source holds a NUL character, which no path can")
    folder = base / source
    if not (folder / MANIFEST_NAME).is_file():
        raise DataError(
            f"data.source {source!r}: {folder} holds no {MANIFEST_NAME}: run `moegraph data prepare INPUT -o {source}`"
        )
    return folder


def _cache_root() -> Path:
    return user_cache() / "corpora"
