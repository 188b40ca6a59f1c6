"""`moegraph verify`: every pass proved numerically, in a setting where it acts; or the steps of a run, once more."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moegraph.cli.options import Json, PassFile, Set, SpecArgument, load_pass_files
from moegraph.cli.output import Status, print_json, print_table, say
from moegraph.errors import UsageError

if TYPE_CHECKING:
    from moegraph.verify.passes import VerifyReport

BROKEN = 3
MOST_RANKS = 4096
MOST_NODES = 8  # named per pass and kind of block; --json names all


def verify_command(
    spec: SpecArgument = None,
    set_: Set = None,
    pass_file: PassFile = None,
    world: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_RANKS, help="Ranks of the layout to prove. Default: the spec's, made small."),
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=2**63 - 1, help="Seed of the weights and tokens that the graphs are run on.")
    ] = 0,
    steps: Annotated[
        str | None,
        typer.Option(metavar="A:B", help="Given the folder of a run: train these steps again and compare each."),
    ] = None,
    nproc: Annotated[int | None, typer.Option(min=1, help="Processes for --steps, as many as the run had.")] = None,
    json: Json = False,
) -> int:
    """Prove each pass, or a run: equal outputs and gradients."""
    from moegraph.cli.sources import find_spec, is_run, load

    if spec is not None and is_run(Path(spec)):
        from moegraph.cli.verify_run import verify_run

        return verify_run(Path(spec), steps, set_ or [], pass_file or [], nproc, json)
    if steps is not None or nproc is not None:
        raise UsageError("--steps and --nproc are for the folder of a run: name one")
    loaded = load(find_spec(spec), set_).spec
    from moegraph.verify.passes import verify_spec

    load_pass_files(pass_file)
    with Status() as status:
        report = verify_spec(loaded, seed=seed, world=world, progress=lambda name: status(f"verifying {name}"))
    if json:
        print_json(report.to_json())
    else:
        print_report(report)
    for sentence in breaches(report):
        say(f"error: {sentence}")
    return 0 if report.ok else BROKEN


def print_report(report: VerifyReport) -> None:
    """Which layout was proved and the collectives of its stages; the table: per pass how many nodes it rewrote and the
    largest relative differences of outputs and gradients; then those nodes by name."""
    if report.stages:
        print(f"proved at {report.layout}")
        for stage in report.stages:
            print(stage)
        print()
    rows = [
        [
            row.name,
            row.tier,
            _difference(row.tolerance),
            row.rewritten,
            _difference(row.output_difference),
            _difference(row.gradient_difference),
            "found" if row.planted_found else "not planted" if row.planted_found is None else "MISSED",
            "ok" if row.ok else "FAILED",
            row.note,
        ]
        for row in report.rows
    ]
    columns = ["pass", "tier", ">bound", ">rewritten", ">outputs", ">gradients", "planted fault", "verdict", "note"]
    print_table(columns, rows)
    print()
    for row in report.rows:
        for kind, names in row.nodes.items():
            more = f" and {len(names) - MOST_NODES} more" if len(names) > MOST_NODES else ""
            print(f"rewritten by {row.name} in {kind}: {', '.join(names[:MOST_NODES])}{more}")
    if report.reduced:
        print(f"\nmade smaller to run here: {report.reduced}")


def _difference(value: float) -> str:
    return "0.0" if value == 0 else f"{value:.1e}"


def breaches(report: VerifyReport) -> list[str]:
    """One sentence per pass that does not hold, each naming the first node that differs, and per stage."""
    stages = [f"collectives do not hold: {stage}" for stage in report.stages if not stage.ok]
    return stages + [
        f"pass {row.name!r} does not hold: "
        + (f"the first node that differs is {row.first_difference}" if row.first_difference else row.note)
        for row in report.rows
        if not row.ok
    ]
