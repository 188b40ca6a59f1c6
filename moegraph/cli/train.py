"""`moegraph train`: a spec, or a compiled directory whose graphs still are what they were, is trained.

A compiled directory is data: its resolved spec is compiled again, and training starts only if every pass leaves the
graphs whose hashes the directory's report holds. The folder of a run goes on from its newest checkpoint.

A layout of several ranks is a process each: `--nproc` starts them here, torchrun on several hosts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated

import typer

from moegraph.artifact_names import SPEC_NAME
from moegraph.cli.compile_ import last_compiled
from moegraph.cli.options import DEFAULT_SPEC, Json, PassFile, Set, load_pass_files, spec_name
from moegraph.cli.output import Status, print_json, say
from moegraph.cli.ranks import start_ranks, this_rank
from moegraph.cli.sources import find_spec, is_run, load, load_run
from moegraph.compiled_folder import read_compiled
from moegraph.errors import SpecError

TERMINATED = 143  # SIGTERM came: a checkpoint was saved, and the same command goes on from it
SAVE_SECONDS = 600.0  # from SIGTERM to SIGKILL with --nproc: a step and a checkpoint have to fit into it

if TYPE_CHECKING:
    from moegraph.specs import Spec


def train_command(
    spec: Annotated[
        str | None,
        typer.Argument(
            metavar="[SPEC|DIR|RUN]",
            help=f"A spec, a preset, a compiled directory, or the folder of a run to go on with. Default: "
            f"./{DEFAULT_SPEC}, else what was compiled last.",
        ),
    ] = None,
    set_: Set = None,
    pass_file: PassFile = None,
    nproc: Annotated[
        int | None,
        typer.Option(min=1, help="Start this many processes on this host, as many as the layout has ranks."),
    ] = None,
    json: Json = False,
) -> int:
    """Train a model."""
    loaded, folder = _find(spec, set_ or ())
    ranks = this_rank(loaded.layout.world, nproc)
    if ranks is None:
        if folder is not None:
            read_compiled(folder)  # what is wrong with it is said once, and not by every rank
        options = [f"--set={each}" for each in set_ or ()] + [f"--pass-file={each}" for each in pass_file or ()]
        named = [spec] if spec is not None else []
        return start_ranks(
            loaded.layout.world, ["train", *named, *options, *["--json"] * json], save_seconds=SAVE_SECONDS
        )
    return _train(loaded, folder, pass_file, ranks, json)


def _train(loaded: Spec, folder: Path | None, pass_file: list[Path] | None, ranks: tuple[int, int], json: bool) -> int:
    """Trains as one rank of a world; the exit status. Rank 0 alone says anything."""
    from moegraph.artifact import check_unchanged
    from moegraph.compiled import compile as compile_spec
    from moegraph.runtime.progress import Progress
    from moegraph.runtime.trainer import train

    rank, world = ranks
    report = read_compiled(folder) if folder is not None else None
    load_pass_files(pass_file)
    compiled = None  # without a report to agree with, the trainer looks at the data before it compiles
    if report is not None:
        with Status() as status:
            compiled = compile_spec(loaded, progress=lambda step: status(f"compiling: {step}"))
        check_unchanged(report, compiled)
        if rank == 0:
            say(f"{folder}: the graphs after each of {len(report.hashes)} passes are those it was compiled to")
    with ExitStack() as stack:
        shown: IO[str] = sys.stderr if json else sys.stdout
        if rank != 0:
            shown = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
        progress = Progress(loaded.train.steps, loaded.train.log_every, shown)
        result = train(loaded, base=Path.cwd(), progress=progress, compiled=compiled, rank=rank, world=world)
    if json and rank == 0:
        print_json(result.to_json())
    return TERMINATED if result.stopped else 0


def _find(given: str | None, overrides: Sequence[str]) -> tuple[Spec, Path | None]:
    """The spec to train, and the compiled directory that it has to agree with, if one is meant."""
    if given is not None and is_run(Path(given)):
        return load_run(Path(given), overrides), None
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
