"""`moegraph compile`: the passes run, and everything they did is written down."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moegraph.artifact_names import REPORT_NAME, SPEC_NAME
from moegraph.cli.options import Json, PassFile, Set, SpecArgument, load_pass_files
from moegraph.cli.output import Status, counted, print_json, print_table, say
from moegraph.errors import UsageError

if TYPE_CHECKING:
    from moegraph.compiled import Compiled
    from moegraph.passes.pipeline import PassRecord

LAST_COMPILED = Path(".moegraph") / "last-compiled"
BROKEN = 3


def compile_command(
    spec: SpecArgument = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="DIR", help="Default: compiled/ and the name of the spec.")
    ] = None,
    set_: Set = None,
    pass_file: PassFile = None,
    verify: Annotated[bool, typer.Option("--verify", help="Also prove each pass numerically.")] = False,
    rank: Annotated[
        int | None, typer.Option(metavar="R", help="Only the graphs and blocks of this rank's stages. Default: all.")
    ] = None,
    json: Json = False,
) -> int:
    """Run the passes and write graphs, differences, a report."""
    from moegraph.cli.sources import find_spec, load

    name = find_spec(spec)
    loaded = load(name, set_).spec
    folder = output or Path("compiled") / _stem(name)
    from moegraph.artifact import build_report, check_writable, write_compiled
    from moegraph.compiled import compile as compile_spec

    check_writable(folder)  # before minutes of work
    pass_files = load_pass_files(pass_file)
    verified = None
    with Status() as status:
        compiled = compile_spec(loaded, rank=rank, progress=lambda step: status(f"compiling: {step}"))
        if verify:
            from moegraph.verify.passes import verify_spec

            verified = verify_spec(loaded, progress=lambda step: status(f"verifying {step}"))
        report = build_report(compiled, pass_files=pass_files, verified=verified.to_json() if verified else None)
        status("writing")
        write_compiled(folder, compiled, report)
    if compiled.whole:
        _remember(folder)
    if json:
        print_json({"directory": str(folder), **report})
    else:
        _print(compiled, report, folder)
    if verified is None:
        return 0
    from moegraph.cli.verify import breaches, print_report

    if not json:
        print()
        print_report(verified)
    for sentence in breaches(verified):
        say(f"error: {sentence}")
    return 0 if verified.ok else BROKEN


def last_compiled() -> Path | None:
    """The directory that `compile` wrote last from this working directory, if it is still there."""
    try:
        text = LAST_COMPILED.read_text(encoding="utf-8").removesuffix("\n")
    except (OSError, UnicodeDecodeError):
        return None
    return Path(text) if text and "\0" not in text and Path(text).is_dir() else None


def _remember(folder: Path) -> None:
    partial = LAST_COMPILED.with_name(f"{LAST_COMPILED.name}.{os.getpid()}")
    try:
        LAST_COMPILED.parent.mkdir(exist_ok=True)
        partial.write_text(f"{folder}\n", encoding="utf-8")
        partial.replace(LAST_COMPILED)
    except OSError as error:
        say(f"warning: {LAST_COMPILED} cannot be written ({error.strerror}); name {folder} when you train")


def _stem(name: str) -> str:
    """The spec's file name without its ending; a compiled directory's spec has the directory's name."""
    path = Path(name)
    compiled = path.name == SPEC_NAME and (path.parent / REPORT_NAME).is_file()
    stem = path.parent.name if compiled else path.stem
    if not stem:
        raise UsageError(f"{name} gives no name for a folder: name one with -o")
    return stem


def _print(compiled: Compiled, report: dict[str, Any], folder: Path) -> None:
    records = compiled.records
    columns = ["pass", "level", "tier", ">rewritten", ">seconds", "note"]
    print_table(columns, [[r.name, r.level, r.tier, r.count, f"{r.seconds:.2f}", note_of(r)] for r in records])
    total, active = report["parameters"]["total"], report["parameters"]["active"]
    print(f"\nparameters  {total:,} ({counted(total)}), of which a token meets {active:,} ({counted(active)})")
    print(f"operations  {counted(report['flops_per_token'], operations=True)} per token, forward and backward")
    if compiled.rank is not None:
        print(f"rank        {compiled.rank} of {report['world']}: {_stages_text(compiled)}")
    for note in report["notes"]:
        print(f"note        {note}")
    print(f"written to  {folder}")


def _stages_text(compiled: Compiled) -> str:
    """`stage 0 (embedding, layers.0), stage 3 (layers.3, head)`."""
    from moegraph.graph.instances import blocks_text

    return ", ".join(
        f"stage {stage} ({blocks_text(i for i in compiled.instances if i.stage == stage)})" for stage in compiled.stages
    )


def note_of(record: PassRecord) -> str:
    """Why a pass rewrote nothing; where it did, in which kinds of block if not in all."""
    acted = [kind for kind, names in record.rewritten.items() if names]
    if not acted:
        return "; ".join(dict.fromkeys(filter(None, record.notes.values())))
    if len(acted) == len(record.rewritten):
        return ""
    return "in " + ", ".join(acted)
