"""`moegraph compare`: several specs are trained on the same tokens, with the same seeds, and their losses compared."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moegraph.cli.options import Json, PassFile, Set, load_pass_files
from moegraph.cli.output import counted, print_json, print_table, say
from moegraph.cli.sources import find_spec
from moegraph.errors import UsageError

if TYPE_CHECKING:
    from moegraph.runtime.comparison import Comparison, Trained


def compare_command(
    specs: Annotated[
        list[str], typer.Argument(metavar="SPEC SPEC …", help="Specs or presets; the first against each other one.")
    ],
    seeds: Annotated[
        str, typer.Option(help="Seeds, with commas between: initial values and order of samples.")
    ] = "0,1,2",
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Where the runs go.")] = Path(
        "runs/compare"
    ),
    set_: Set = None,
    pass_file: PassFile = None,
    json: Json = False,
) -> None:
    """Train several specs on the same tokens and compare."""
    from moegraph.specs import load_spec

    numbers = _seeds(seeds)
    names = _names(specs)
    loaded = {name: load_spec(find_spec(spec), set_ or ()) for name, spec in zip(names, specs, strict=True)}
    from moegraph.runtime.comparison import compare

    load_pass_files(pass_file)

    def report(trained: Trained) -> None:
        say(
            f"{trained.name}, seed {trained.seed}: validation loss {trained.validation_loss:.4f} "
            f"after {trained.seconds:.0f} s"
        )

    found = compare(loaded, numbers, base=Path.cwd(), output=output, report=report)
    if json:
        print_json(found.to_json())
    else:
        print_comparison(found)


def print_comparison(found: Comparison) -> None:
    """One row per run, then a sentence per spec that the first one is compared with."""
    rows = [
        [run.name, counted(run.active_parameters), run.seed, f"{run.loss:.4f}", f"{run.validation_loss:.4f}"]
        for run in found.runs
    ]
    print_table(["spec", ">active parameters", ">seed", ">last loss", ">validation loss"], rows)
    for against in found.against:
        print(f"\n{against.sentence()}")


def _seeds(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--seeds {text!r}: whole numbers with commas between, such as 0,1,2") from None


def _names(specs: list[str]) -> list[str]:
    """What the specs are called in the table and in the names of folders: their files' names."""
    names = [Path(spec).stem if Path(spec).suffix else Path(spec).name for spec in specs]
    if len(set(names)) < len(names):
        raise UsageError(f"two of the specs are called {max(names, key=names.count)}: give their files different names")
    return names
