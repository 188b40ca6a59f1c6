"""The passes that exist, by name, and passes of a user's own from a Python file."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

from moegraph.errors import UsageError
from moegraph.passes.contract import Pass


class Registry:
    """Pass classes in the order they run when their contracts leave a choice."""

    def __init__(self) -> None:
        self._passes: dict[str, type[Pass]] = {}

    def register(self, pass_class: type[Pass]) -> type[Pass]:
        """Adds a pass (usable as a class decorator); its name must be new."""
        name = pass_class.name
        if name in self._passes and self._passes[name] is not pass_class:
            raise UsageError(f"a pass named {name!r} is registered already; give yours another name")
        self._passes[name] = pass_class
        return pass_class

    def unregister(self, name: str) -> None:
        """Removes a pass by name."""
        del self._passes[name]

    def __getitem__(self, name: str) -> type[Pass]:
        return self._passes[name]

    def __contains__(self, name: str) -> bool:
        return name in self._passes

    def __iter__(self) -> Iterator[type[Pass]]:
        return iter(self._passes.values())

    def names(self) -> list[str]:
        """Names in registration order."""
        return list(self._passes)

    def load_file(self, path: str | Path) -> list[str]:
        """Runs a Python file that registers passes, and returns the names it added. The caller chose to run it: a
        spec cannot name a file to be run."""
        path = Path(path)
        if not path.is_file():
            raise UsageError(f"no pass file {path}")
        before = set(self._passes)
        module_spec = importlib.util.spec_from_file_location(f"moegraph_user_passes_{path.stem}", path)
        if module_spec is None or module_spec.loader is None:
            raise UsageError(f"{path} is not a Python file")
        module_spec.loader.exec_module(importlib.util.module_from_spec(module_spec))
        added = [name for name in self._passes if name not in before]
        if not added:
            raise UsageError(f"{path} registered no pass; decorate one with @moegraph.passes.registry.register")
        return added


registry = Registry()
