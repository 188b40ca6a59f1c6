"""What SPEC on a command line may be: a spec file, a preset, or a compiled directory, which holds a spec."""

from __future__ import annotations

from pathlib import Path

from moegraph.artifact_names import REPORT_NAME, SPEC_NAME
from moegraph.cli.options import spec_name
from moegraph.errors import UsageError


def find_spec(given: str | None) -> str:
    """The spec file that SPEC names; ./moegraph.yaml when it is left out. A compiled directory stands for its spec.

    Raises UsageError for a folder that is no compiled directory.
    """
    name = spec_name(given)
    if not Path(name).is_dir():
        return name
    if not (Path(name) / REPORT_NAME).is_file():
        raise UsageError(f"{name} is a folder without {REPORT_NAME}, so no compiled directory: name a spec file")
    return str(Path(name) / SPEC_NAME)
