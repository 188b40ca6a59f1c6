"""`moegraph train`: a spec, or a compiled directory whose graphs still are what they were, is trained.

A compiled directory is data: its resolved spec is compiled again, and training starts only if every pass leaves the
graphs whose hashes the directory's report holds.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moegraph.artifact_names import SPEC_NAME
from moegraph.cli.compile_ import last_compiled
from moegraph.cli.options import DEFAULT_SPEC, Json, PassFile, Set, load_pass_files, refuse_many_ranks, spec_name
from moegraph.cli.output import Status, print_json, say
from moegraph.cli.sources import find_spec, load
from moegraph.errors import SpecError, UsageError

if TYPE_CHECKING:
    from moegraph.specs import Spec


def train_command(
    spec: Annotated[
        str | None,
        typer.Argument(
            metavar="[SPEC|DIR]",
            help=f"A spec, a preset or a compiled directory. Default: ./{DEFAULT_SPEC}, else what was compiled last.",
        ),
    ] = None,
    set_: Set = None,
    pass_file: PassFile = None,
    nproc: Annotated[int, typer.Option(help="Processes to train with; only 1 exists so far.")] = 1,
    json: Json = False,
) -> None:
    """Train a model."""
    refuse_many_ranks("nproc", nproc)
    loaded, folder = _find(spec, set_ or ())
    _check_layout(loaded)
    from moegraph.artifact import check_unchanged, read_compiled
    from moegraph.compiled import compile as compile_spec
    from moegraph.runtime.progress import Progress
    from moegraph.runtime.trainer import train

    report = read_compiled(folder) if folder is not None else None
    load_pass_files(pass_file)
    compiled = None  # without a report to agree with, the trainer looks at the data before it compiles
    if report is not None:
        with Status() as status:
            compiled = compile_spec(loaded, progress=lambda step: status(f"compiling: {step}"))
        check_unchanged(report, compiled)
        say(f"{folder}: the graphs after each of {len(report.hashes)} passes are those it was compiled to")
    progress = Progress(loaded.train.steps, loaded.train.log_every, sys.stderr if json else sys.stdout)
    result = train(loaded, base=Path.cwd(), progress=progress, compiled=compiled)
    if json:
        print_json(result.to_json())


def _find(given: str | None, overrides: Sequence[str]) -> tuple[Spec, Path | None]:
    """The spec to train, and the compiled directory that it has to agree with, if one is meant."""
    if given is not None:
        folder = Path(given) if Path(given).is_dir() else None
        return load(find_spec(given), overrides).spec, folder
    last = last_compiled()
    if last is None:
        return load(spec_name(None), overrides).spec, None
    if not Path(DEFAULT_SPEC).exists():
        return load(str(last / SPEC_NAME), overrides).spec, last
    spec = load(DEFAULT_SPEC, overrides).spec
    try:
        same = load(str(last / SPEC_NAME), overrides).spec == spec
    except SpecError:
        same = False
    if not same:
        say(f"note: {last} was compiled last, but not from ./{DEFAULT_SPEC} as it is now, so it is not used")
    return spec, last if same else None


def _check_layout(spec: Spec) -> None:
    layout = spec.layout
    if layout.world > 1:
        raise UsageError(
            f"layout asks for {layout.world} processes (dp {layout.dp} × pp {layout.pp}), and parallel layouts do not "
            'exist yet: train with --set "layout={dp: 1, ep: 1, pp: 1, transport: exact}"'
        )
