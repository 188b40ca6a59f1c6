"""`moegraph inspect`: the graphs of a spec, what a pass changed, the final values of a spec, or a run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moegraph.cli.options import Json, PassFile, Set, load_pass_files, refuse
from moegraph.cli.output import Status, print_json
from moegraph.errors import UsageError

if TYPE_CHECKING:
    from moegraph.compiled import Compiled


def inspect_command(
    spec: Annotated[
        str | None,
        typer.Argument(metavar="[SPEC|DIR]", help="A spec, a preset, a compiled directory, or the folder of a run."),
    ] = None,
    other: Annotated[
        str | None,
        typer.Argument(metavar="[OTHER]", help="With --trace-hash: the run, or saved trace, to compare with."),
    ] = None,
    set_: Set = None,
    pass_file: PassFile = None,
    after: Annotated[
        str | None, typer.Option(metavar="PASS", help="The graphs after this pass (default: the last layer pass).")
    ] = None,
    diff: Annotated[str | None, typer.Option(metavar="PASS", help="What this pass changed.")] = None,
    full: Annotated[bool, typer.Option("--full", help="With --diff: also every line of graphs that are new.")] = False,
    kind: Annotated[str | None, typer.Option(metavar="KIND", help="Only this kind of block.")] = None,
    graph: Annotated[
        str | None, typer.Option(metavar="GRAPH", help="Only this graph: layer, joint, forward, backward, …")
    ] = None,
    stage: Annotated[int | None, typer.Option(metavar="N", help="Only the blocks of this pipeline stage.")] = None,
    grep: Annotated[
        str | None, typer.Option(metavar="RE", help="Only lines that match this regular expression.")
    ] = None,
    expand: Annotated[bool, typer.Option("--expand", help="Every block by itself, with full names.")] = False,
    stat: Annotated[bool, typer.Option("--stat", help="Counts of nodes and operators instead of the nodes.")] = False,
    kernels: Annotated[
        bool, typer.Option("--kernels", help="What each grouped product runs on, with which configuration, and why.")
    ] = False,
    arch: Annotated[
        str | None, typer.Option(metavar="ARCH", help="With --kernels: sm_90, sm_100 or sm_103. Default: this GPU's.")
    ] = None,
    schedule: Annotated[
        bool, typer.Option("--schedule", help="Pipeline stages, their ranks, and what each rank does when.")
    ] = False,
    shards: Annotated[
        bool, typer.Option("--shards", help="Which parameters are reduced over which ranks, and who holds what.")
    ] = False,
    precision: Annotated[
        bool, typer.Option("--precision", help="In which format each product of experts runs, and why.")
    ] = False,
    predict: Annotated[
        str | None, typer.Option(metavar="MACHINE", help="How long a step would take on B300 or H200, and on what.")
    ] = None,
    resolved: Annotated[
        bool, typer.Option("--resolved", help="Every final value of the spec with its origin.")
    ] = False,
    router: Annotated[bool, typer.Option("--router", help="Of a run: load per layer and expert.")] = False,
    trace_hash: Annotated[
        bool, typer.Option("--trace-hash", help="Of a run: a digest of every node of a step, computed again.")
    ] = False,
    step: Annotated[
        int | None, typer.Option(metavar="N", help="With --trace-hash: which step. Default: the first that differs.")
    ] = None,
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --trace-hash: write the trace, to compare with later.")
    ] = None,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="With --trace-hash: start this many processes, one for each rank.")
    ] = None,
    json: Json = False,
) -> int:
    """Print graphs, what a pass changed, values, or a run."""
    graphs = {"after": after, "kind": kind, "graph": graph, "grep": grep, "stage": stage}
    flags = {"expand": expand, "stat": stat, "pass_file": pass_file, "kernels": kernels, "arch": arch}
    views = {"schedule": schedule, "shards": shards, "precision": precision, "predict": predict}
    flags |= views
    if trace_hash:
        refuse(**graphs, **{**flags, "pass_file": None}, diff=diff, full=full, because="does not go with --trace-hash")
        refuse(resolved=resolved, router=router, because="does not go with --trace-hash")
        if spec is None:
            raise UsageError(
                "--trace-hash needs the folder of a run, such as `moegraph inspect runs/tiny --trace-hash`"
            )
        from moegraph.cli.inspect_trace import Request, inspect_trace

        request = Request(step, set_ or (), pass_file or (), nproc)
        return inspect_trace(Path(spec), Path(other) if other is not None else None, request, save, as_json=json)
    if other is not None:
        raise UsageError(f"unexpected extra argument {other!r}: a second one goes with --trace-hash")
    refuse(step=step, save=save, nproc=nproc, because="goes with --trace-hash")
    if spec is not None and _is_run(Path(spec)):
        refuse(**graphs, **flags, diff=diff, full=full, set=set_, resolved=resolved, because="does not go with a run")
        from moegraph.cli.inspect_run import print_run

        print_run(Path(spec), router=router, as_json=json)
        return 0
    refuse(router=router, because="goes with the folder of a run, such as `moegraph inspect runs/tiny --router`")
    if resolved:
        refuse(**graphs, **flags, diff=diff, full=full, because="does not go with --resolved")
        _print_resolved(spec, set_, as_json=json)
        return 0
    view = next((name for name, asked in views.items() if asked), None)
    if view is not None:
        unused = {name: value for name, value in {**graphs, **flags}.items() if name not in (view, "pass_file")}
        refuse(**unused, diff=diff, full=full, because=f"does not go with --{view}")
        _print_view(_compile(spec, set_, pass_file), view, predict or "", as_json=json)
        return 0
    if kernels:
        unused = {"after": after, "graph": graph, "grep": grep, "stage": stage, "expand": expand, "stat": stat}
        refuse(**unused, diff=diff, full=full, because="does not go with --kernels")
        from moegraph.cli.inspect_kernels import print_kernels

        print_kernels(lambda: _compile(spec, set_, pass_file), arch, kind, as_json=json)
        return 0
    refuse(arch=arch, because="goes with --kernels")
    if diff is None:
        refuse(full=full, because="goes with --diff")
    else:
        refuse(after=after, expand=expand, stat=stat, grep=grep, because="does not go with --diff")
    _check_pattern(grep)  # before seconds of work
    compiled = _compile(spec, set_, pass_file)
    from moegraph.cli.inspect_graphs import Selection, print_difference, print_graphs, print_statistics

    selection = Selection(kind, graph, expand, grep, stage)
    if diff is not None:
        print_difference(compiled, diff, selection, full=full, as_json=json)
    elif stat:
        print_statistics(compiled, after, selection, as_json=json)
    else:
        print_graphs(compiled, after, selection, as_json=json)
    return 0


def _print_view(compiled: Compiled, view: str, machine: str, *, as_json: bool) -> None:
    if view == "precision":
        from moegraph.cli.inspect_precision import print_precision

        print_precision(compiled, as_json=as_json)
    elif view == "predict":
        from moegraph.cli.inspect_predict import print_prediction

        print_prediction(compiled.program, machine, as_json=as_json)
    elif view == "schedule":
        from moegraph.cli.inspect_schedule import print_schedule

        print_schedule(compiled.program, as_json=as_json)
    else:
        from moegraph.cli.inspect_shards import print_shards

        print_shards(compiled.program, as_json=as_json)


def _check_pattern(text: str | None) -> None:
    try:
        re.compile(text or "")
    except re.error as error:
        raise UsageError(f"--grep {text!r} is not a regular expression: {error}") from None


def _is_run(folder: Path) -> bool:
    return (folder / "metrics.jsonl").is_file()  # moegraph.runtime.run_log.METRICS


def _compile(spec: str | None, overrides: list[str] | None, pass_files: list[Path] | None) -> Compiled:
    from moegraph.cli.sources import find_spec, load

    loaded = load(find_spec(spec), overrides).spec  # before torch is imported: its errors come at once
    from moegraph.compiled import compile as compile_spec

    load_pass_files(pass_files)
    with Status() as status:
        return compile_spec(loaded, progress=lambda step: status(f"compiling: {step}"))


def _print_resolved(spec: str | None, overrides: list[str] | None, *, as_json: bool) -> None:
    from moegraph.cli.sources import find_spec, load
    from moegraph.specs.resolved import resolved_data, resolved_lines

    resolved = load(find_spec(spec), overrides)
    if as_json:
        print_json({"spec": resolved.source, "sources": list(resolved.sources), "values": resolved_data(resolved)})
    else:
        print("\n".join(resolved_lines(resolved)))
