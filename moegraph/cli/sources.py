"""What SPEC on a command line may be: a spec file, a preset, or a folder that holds a spec: a compiled directory or, to
go on with it, a run."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from moegraph.artifact_names import REPORT_NAME, SPEC_NAME
from moegraph.cli.compile_ import last_compiled
from moegraph.cli.options import spec_name
from moegraph.errors import UsageError

if TYPE_CHECKING:
    from moegraph.specs import ResolvedSpec, Spec

RUN_MANIFEST = "manifest.json"


def load(name: str, overrides: Sequence[str] | None) -> ResolvedSpec:
    """Loads the spec `name`. The one that `compile` wrote last is trusted: what it names was given by whoever ran that,
    folders and a run cut short by --set included, which a spec file from elsewhere may not name."""
    from moegraph.specs import load_resolved

    last = last_compiled()
    ours = last is not None and Path(name).absolute() == (last / SPEC_NAME).absolute()
    return load_resolved(name, overrides or (), trusted=ours)


def load_run(folder: Path, overrides: Sequence[str]) -> Spec:
    """The spec of the run in `folder`, to go on with it there: it resumes from `folder` and writes into it, whatever
    its manifest says. What else the manifest names was given by whoever started it."""
    from moegraph.runtime.run_log import read_manifest
    from moegraph.specs import load_resolved

    spec = read_manifest(folder).get("spec")
    if not isinstance(spec, dict):
        raise UsageError(f"{folder / RUN_MANIFEST} is not the manifest of a run: it holds no spec")
    name = json.dumps(str(folder))
    here = [f"train.output_dir={name}", f"checkpoint.resume={name}", *overrides]
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / SPEC_NAME
        file.write_text(json.dumps(spec), encoding="utf-8")  # YAML 1.2 reads JSON
        return load_resolved(str(file), here, trusted=True).spec


def is_run(folder: Path) -> bool:
    """Whether this is the folder of a run, and no compiled directory."""
    return (folder / RUN_MANIFEST).is_file() and not (folder / REPORT_NAME).is_file()


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
