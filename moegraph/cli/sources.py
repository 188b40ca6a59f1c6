"""What SPEC on a command line may be: a spec file, a preset, or a compiled directory, which holds a spec."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from moegraph.artifact_names import REPORT_NAME, SPEC_NAME
from moegraph.cli.compile_ import last_compiled
from moegraph.cli.options import spec_name
from moegraph.errors import UsageError

if TYPE_CHECKING:
    from moegraph.specs import ResolvedSpec


def load(name: str, overrides: Sequence[str] | None) -> ResolvedSpec:
    """Loads the spec `name`. The one that `compile` wrote last is trusted: what it names was given by whoever ran that,
    folders and a run cut short by --set included, which a spec file from elsewhere may not name."""
    from moegraph.specs import load_resolved

    last = last_compiled()
    ours = last is not None and Path(name).absolute() == (last / SPEC_NAME).absolute()
    return load_resolved(name, overrides or (), trusted=ours)


def find_spec(given: str | None) -> str:
    """The spec file that SPEC names; ./moegraph.yaml when it is left out. A compiled directory stands for its spec.

    Raises UsageError for a folder that is no compiled directory.
    """
    name = spec_name(given)
    if not name:
        raise UsageError("SPEC is empty: name a spec file, or leave it out for ./moegraph.yaml")
    if not Path(name).is_dir():
        return name
    if not (Path(name) / REPORT_NAME).is_file():
        raise UsageError(f"{name} is a folder without {REPORT_NAME}, so no compiled directory: name a spec file")
    return str(Path(name) / SPEC_NAME)
