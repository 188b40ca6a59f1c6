"""Finding and reading spec files, `extends:` included.

A spec is a file, or the name of a shipped preset (`presets/tiny.yaml`) if there is no such file. `extends:` names
another spec, relative to the file it stands in, or a shipped preset. It stays within the folder of the spec that was
asked for (no absolute path, no `..`, no link that leads out), goes at most MAX_EXTENDS files deep, and never in a
circle.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

from moegraph.errors import Problem
from moegraph.specs.merge import overlay
from moegraph.specs.nodes import Limits, Mapping, Mark, Node, Scalar, plain, show, show_name
from moegraph.specs.suggest import nearest_word
from moegraph.specs.yaml_reader import problem_at, read_yaml

MAX_EXTENDS = 8
PRESETS = Path(__file__).resolve().parent / "presets"


def preset_names() -> list[str]:
    """The shipped presets as one writes them: presets/tiny.yaml, …"""
    return sorted(f"presets/{path.name}" for path in PRESETS.glob("*.yaml"))


@dataclass(slots=True)
class Sources:
    """The files that a spec was read from, the one asked for first, and what went wrong on the way."""

    problems: list[Problem]
    limits: Limits
    trusted: bool = False
    files: list[str] = field(default_factory=list)
    incomplete: bool = False  # something that is extended could not be read

    def read(self, name: str) -> Mapping | None:
        """The tree of the spec `name`, laid over what it extends; None if it cannot be read."""
        path = Path(name)
        if not os.path.lexists(path) and name in preset_names():
            path, shown = PRESETS / Path(name).name, name
        else:
            shown = show_name(name)
        mark = Mark(shown)
        return self._read(path, shown, mark, root=_real(path.parent), trail=[])

    def extend(self, tree: Mapping, folder: Path) -> Mapping | None:
        """A tree that was not read from a file, laid over what it extends; relative paths start at `folder`."""
        return self._extend(tree, folder, _real(folder), [])

    def _read(self, path: Path, shown: str, asked: Mark, root: Path, trail: list[Path]) -> Mapping | None:
        data = self._bytes(path, shown, asked)
        if data is None:
            return None
        self.files.append(shown)
        node = read_yaml(data, shown, self.problems, self.limits, trusted=self.trusted)
        if node is None:
            return None
        if not isinstance(node, Mapping):
            message = "the file is empty" if plain(node) is None else "a spec is a mapping of sections, this is not"
            fix = "`moegraph init` writes a spec to start from"
            self.problems.append(problem_at(node.mark, "MG102", message, fix=fix))
            return None
        return self._extend(node, path.parent, root, [*trail, _real(path)])

    def _extend(self, node: Mapping, folder: Path, root: Path, trail: list[Path]) -> Mapping | None:
        named = node.entries.get("extends")
        if named is None:
            return node
        rest = {key: value for key, value in node.entries.items() if key != "extends"}
        own = Mapping(rest, node.mark, node.keys, node.size - named.size)
        found = self._locate(named, folder, root, trail)
        if found is None:
            self.incomplete = True
            return own
        path, shown, base_root = found
        base = self._read(path, shown, named.mark, base_root, trail)
        if base is None:
            self.incomplete = True
            return own
        merged = overlay(base, own)
        assert isinstance(merged, Mapping)
        return merged

    def _locate(self, named: Node, folder: Path, root: Path, trail: list[Path]) -> tuple[Path, str, Path] | None:
        """The file that `extends` names, how to show it, and the folder it is confined to."""
        name = named.value if isinstance(named, Scalar) else None
        if not isinstance(name, str) or not name:
            self._refuse(named, "MG105", "must be the path of a spec or of a preset")
            return None
        path = folder / name
        # realpath, not text, decides: a link inside the folder may lead out of it.
        if Path(name).is_absolute() or ".." in Path(name).parts or "\0" in name:
            allowed = "a path below the spec's own folder, or a shipped preset"
            self._refuse(named, "MG109", "leaves the spec's own folder", allowed)
            return None
        if not os.path.lexists(path) and name in preset_names():
            path, shown, root = PRESETS / Path(name).name, name, _real(PRESETS)
        else:
            parent = os.path.dirname(named.mark.origin) if named.mark.line else ""
            shown = show_name(os.path.normpath(os.path.join(parent, name)))
        real = _real(path)
        if not real.is_relative_to(root):
            self._refuse(named, "MG109", "is a link that leads out of the spec's own folder")
            return None
        if real in trail:
            circle = " → ".join([*(each.name for each in trail[trail.index(real) :]), real.name])
            self._refuse(named, "MG102", f"the specs extend each other in a circle: {circle}")
            return None
        if len(trail) >= MAX_EXTENDS:
            self._refuse(named, "MG108", f"more than {MAX_EXTENDS} specs extend one another")
            return None
        return path, shown, root

    def _refuse(self, node: Node, code: str, message: str, allowed: str | None = None) -> None:
        parts = {"path": "extends", "value": show(plain(node)), "allowed": allowed}
        self.problems.append(problem_at(node.mark, code, message, **parts))

    def _bytes(self, path: Path, shown: str, asked: Mark) -> bytes | None:
        """The file's content, at most one byte more than the limit."""
        try:
            # Opened without waiting, so that a named pipe cannot hold the program up.
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(descriptor, "rb") as file:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise IsADirectoryError
                return file.read(self.limits.bytes + 1)
        except FileNotFoundError:
            near = nearest_word(shown, preset_names())
            fix = f"did you mean {near}?" if near else "the shipped presets are " + ", ".join(preset_names())
            self._cannot_read(shown, asked, "there is no such file", fix)
        except IsADirectoryError:
            self._cannot_read(shown, asked, "is not a regular file", "name the spec file itself")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "not a path"
            self._cannot_read(shown, asked, f"cannot be read: {reason}", None)
        return None

    def _cannot_read(self, shown: str, asked: Mark, message: str, fix: str | None) -> None:
        self.problems.append(
            problem_at(asked, "MG101", f"{show_name(shown)}: {message}" if asked.line else message, fix=fix)
        )


def _real(path: Path) -> Path:
    try:
        return Path(os.path.realpath(path))
    except ValueError:  # a path with a NUL in it
        return path
