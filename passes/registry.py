"""The passes that exist, by name, and passes of a user's own from a Python file."""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from collections.abc import Iterator
from hashlib import sha256
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import get_args

from moegraph.errors import UsageError
from moegraph.passes.contract import Level, Pass, Tier

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
_RESERVED = ("lower", "trace")  # steps of the pipeline that are no passes


class Registry:
    """Pass classes in the order they run when their contracts leave a choice."""

    def __init__(self) -> None:
        self._passes: dict[str, type[Pass]] = {}
        self._loaded: dict[Path, list[str]] = {}

    def register(self, pass_class: type[Pass]) -> type[Pass]:
        """Adds a pass (usable as a class decorator); its name must be new. Raises UsageError for a pass whose
        declaration does not hold together."""
        _check_declaration(pass_class)
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

    def is_built_in(self, name: str) -> bool:
        """Whether the pass of that name comes with moegraph."""
        return self._passes[name].__module__.startswith("moegraph.passes.")

    def load_file(self, path: str | Path) -> list[str]:
        """Runs a Python file that registers passes, and returns the names it added. The caller chose to run it: a
        spec cannot name a file to be run. Loading a file again replaces its passes; when it fails, nothing changes."""
        path = Path(path)
        if not path.is_file():
            raise UsageError(f"no pass file {path}")
        before, key = dict(self._passes), path.resolve()
        for name in self._loaded.get(key, ()):
            self._passes.pop(name, None)
        kept = set(self._passes)
        try:
            _run_file(path)
            added = [name for name in self._passes if name not in kept]
            if not added:
                raise UsageError(f"{path} registered no pass; decorate one with @moegraph.passes.registry.register")
        except BaseException:
            self._passes = before
            raise
        self._loaded[key] = added
        return added


def _run_file(path: Path) -> None:
    """The file as a module of its own; dataclasses look their module up in sys.modules, so it has to be there."""
    name = f"moegraph_user_passes_{sha256(str(path.resolve()).encode()).hexdigest()[:12]}_{path.stem}"
    loader = SourceFileLoader(name, str(path))
    module_spec = importlib.util.spec_from_loader(name, loader)
    assert module_spec is not None
    module = importlib.util.module_from_spec(module_spec)
    previous = sys.modules.get(name)
    sys.modules[name] = module
    try:
        loader.exec_module(module)
    except BaseException:
        if previous is None:
            del sys.modules[name]
        else:
            sys.modules[name] = previous
        raise


def _check_declaration(pass_class: type[Pass]) -> None:
    what = getattr(pass_class, "__name__", repr(pass_class))
    if not (isinstance(pass_class, type) and issubclass(pass_class, Pass)):
        raise UsageError(f"{what} is not a pass: derive it from moegraph.passes.Pass")
    name = getattr(pass_class, "name", None)
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name in _RESERVED:
        raise UsageError(
            f"{what}.name is {name!r}; a pass needs a name of its own in small letters, digits, - and _, other than "
            + " and ".join(_RESERVED)
        )
    if "__dataclass_params__" not in vars(pass_class) or not vars(pass_class)["__dataclass_params__"].frozen:
        raise UsageError(f"pass {name!r}: decorate {what} with @dataclass(frozen=True), below registry.register")
    if inspect.isabstract(pass_class):
        raise UsageError(f"pass {name!r}: {what} has no {', '.join(sorted(pass_class.__abstractmethods__))}")
    if getattr(pass_class, "level", None) not in get_args(Level):
        raise UsageError(f"pass {name!r}: level is one of {', '.join(get_args(Level))}")
    if pass_class.tier not in get_args(Tier):
        raise UsageError(f"pass {name!r}: tier is one of {', '.join(get_args(Tier))}")
    if (pass_class.tier == "close") != (pass_class.tolerance > 0):
        raise UsageError(
            f"pass {name!r}: tier {pass_class.tier} with tolerance {pass_class.tolerance:g}; exact means 0, and close "
            "states its bound"
        )


registry = Registry()
