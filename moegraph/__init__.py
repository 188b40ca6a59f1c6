"""moegraph: a spec becomes a graph, passes rewrite it, torch.compile runs it, and a mixture-of-experts model trains.

    spec = moegraph.load_spec("presets/tiny.yaml", overrides=["train.steps=10"])
    program = moegraph.lower(spec)         # the layer graphs, before any pass
    compiled = moegraph.compile(spec)      # after every pass, each one recorded

Names are loaded when they are first used, so `import moegraph` imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moegraph.compiled import compile
    from moegraph.lowering.lower import lower as lower
    from moegraph.specs import load_spec

    __version__: str

__all__ = ["__version__", "compile", "load_spec", "lower"]

_FUNCTIONS = {"compile": "moegraph.compiled", "load_spec": "moegraph.specs", "lower": "moegraph.lowering"}
_PACKAGES = frozenset({"data", "graph", "kernels", "lowering", "ops", "passes", "runtime", "specs", "step", "verify"})


def __getattr__(name: str) -> Any:
    """A public name or a subpackage, imported on first use (PEP 562)."""
    if name in _FUNCTIONS:
        value = getattr(importlib.import_module(_FUNCTIONS[name]), name)
    elif name in _PACKAGES:
        value = importlib.import_module(f"moegraph.{name}")
    elif name == "__version__":
        from importlib.metadata import version

        value = version("moegraph")
    else:
        raise AttributeError(f"module 'moegraph' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PACKAGES})
