"""`moegraph bench layer`: one block with experts, timed beside other ways to run it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from moegraph.benchmarks.shapes import PRESETS, Shape
from moegraph.cli.bench_layer_compile import compile_layer
from moegraph.cli.bench_layer_tables import print_report
from moegraph.cli.options import Json
from moegraph.cli.output import print_json, say
from moegraph.errors import RunError, UsageError

if TYPE_CHECKING:
    import torch

    from moegraph.benchmarks.results import LayerReport

FAILED, WRONG = 1, 3


def layer_command(
    preset: Annotated[
        str, typer.Option(help=f"{', '.join(PRESETS)}, with commas between: the shape, unless given below.")
    ] = "A",
    tokens: Annotated[int | None, typer.Option(min=1)] = None,
    d_model: Annotated[int | None, typer.Option(min=8)] = None,
    d_ff: Annotated[int | None, typer.Option(min=8)] = None,
    experts: Annotated[int | None, typer.Option(min=1)] = None,
    top_k: Annotated[int | None, typer.Option(min=1)] = None,
    skew: Annotated[float, typer.Option(min=0.0, max=10.0, help="Standard deviation of a bias per expert.")] = 0.0,
    backward: Annotated[bool, typer.Option("--backward", help="Forward and backward too.")] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Turns; every turn runs each row three times.")] = 15,
    dtype: Annotated[Literal["bf16", "fp32"], typer.Option(help="Of x and the weights.")] = "bf16",
    peers: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Rows of --peers-file, with commas between.")
    ] = None,
    peers_file: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Run a Python file with other blocks, as moegraph/benchmarks/peers.py describes. Repeatable.",
        ),
    ] = None,
    router: Annotated[
        bool | None,
        typer.Option("--router/--no-router", help="A row with router and losses. Default: for preset wide."),
    ] = None,
    compile_: Annotated[
        bool | None,
        typer.Option("--compile/--no-compile", help="moegraph's rows through torch.compile. Default: on CUDA."),
    ] = None,
    graph: Annotated[bool, typer.Option("--graph", help="Also replay moegraph's rows as CUDA graphs.")] = False,
    precision: Annotated[
        str,
        typer.Option(help="bf16, fp8, fp8-wgrad, mxfp8, with commas between: rows beside bf16's."),
    ] = "bf16",
    compile_only: Annotated[
        bool, typer.Option("--compile-only", help="Compile the kernels of --precision mxfp8, run nothing.")
    ] = False,
    arch: Annotated[
        Literal["sm_100", "sm_103"] | None, typer.Option(help="What --compile-only compiles for. Default: sm_103.")
    ] = None,
    error: Annotated[bool, typer.Option("--error/--no-error", help="Compare every row with float64.")] = True,
    device: Annotated[
        Literal["cuda", "cpu"], typer.Option(help="cpu is for small shapes: it tries peers and checks errors.")
    ] = "cuda",
    json: Json = False,
) -> int:
    """Time one block with experts beside other ways to run it, a dense product and a copy, in turn in one process.

    Exit status 1 if a row failed, 3 if one is too far from float64 to be rounding.
    """
    given = {"tokens": tokens, "d_model": d_model, "d_ff": d_ff, "experts": experts, "top_k": top_k}
    shapes = _shapes(preset, {name: value for name, value in given.items() if value is not None}, skew)
    if peers is not None and not peers_file:
        raise UsageError(f"--peers {peers} needs --peers-file FILE, the Python file that has them")
    if graph and device == "cpu":
        raise UsageError("--graph replays CUDA graphs: it cannot go with --device cpu")
    precisions = _precisions(precision, dtype, compile_only, arch)
    if compile_only:
        return compile_layer(shapes, arch or "sm_103", as_json=json)
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise RunError("bench layer needs a CUDA device and torch sees none; --device cpu tries a small shape")
    from moegraph.benchmarks.layer import time_layer
    from moegraph.benchmarks.peers import load_peers, quick_autotuning
    from moegraph.runtime.compile_cache import compile_cache
    from moegraph.runtime.device import choose_device, device_name

    # What peers print must not end up in the tables or the JSON. Their file runs before the device is touched: it may
    # set how its memory is allocated.
    with redirect_stdout(sys.stderr):
        classes = load_peers(peers_file, _names(peers)) if peers_file else []
    where = choose_device(device)
    if "mxfp8" in precisions and where.type == "cuda":
        _has_mx_units(shapes, where)
    compiled = where.type == "cuda" if compile_ is None else compile_
    found: dict[str, LayerReport] = {}
    with compile_cache(device_name(where), inductor=compiled), quick_autotuning(where):
        for name, shape in shapes.items():
            say(f"preset {name}")
            with redirect_stdout(sys.stderr):
                found[name] = time_layer(
                    shape,
                    backward=backward,
                    repeats=repeats,
                    dtype=torch.bfloat16 if dtype == "bf16" else torch.float32,
                    device=where,
                    peers=classes,
                    router=name == "wide" if router is None else router,
                    compiled=compiled,
                    graph=graph,
                    error=error,
                    precisions=precisions,
                    report=say,
                )
            if not json:
                print_report(name, found[name])
                sys.stdout.flush()
    if json:
        print_json({"presets": [{"preset": name, **each.to_json()} for name, each in found.items()]})
    return _status(found)


def _shapes(preset: str, given: Mapping[str, int], skew: float) -> dict[str, Shape]:
    names = _names(preset)
    unknown = [name for name in names if name not in PRESETS]
    if unknown or not names:
        raise UsageError(f"--preset {preset}: {', '.join(PRESETS)}, one or several with commas between")
    shapes = {name: replace(PRESETS[name], skew=skew, **given) for name in names}
    for shape in shapes.values():
        if shape.top_k > shape.experts:
            raise UsageError(f"--top-k {shape.top_k} is more than --experts {shape.experts}")
    return shapes


def _precisions(text: str, dtype: str, compile_only: bool, arch: str | None) -> list[str]:
    """The rows of low precision that are asked for. Raises UsageError for what does not go together."""
    names = _names(text)
    unknown = [name for name in names if name not in ("bf16", "fp8", "fp8-wgrad", "mxfp8")]
    if unknown or not names:
        raise UsageError(f"--precision {text}: bf16, fp8, fp8-wgrad, mxfp8, one or several with commas between")
    if compile_only and list(names) != ["mxfp8"]:
        raise UsageError("--compile-only goes with --precision mxfp8 and nothing else")
    if arch is not None and not compile_only:
        raise UsageError("--arch goes with --compile-only")
    low = list(dict.fromkeys(name for name in names if name != "bf16"))
    if low and dtype != "bf16":
        raise UsageError(f"--precision {text} quantises bf16: it cannot go with --dtype {dtype}")
    return low


def _has_mx_units(shapes: Mapping[str, Shape], device: torch.device) -> None:
    """Raises UsageError where MXFP8 would be emulated: the time of that says nothing about MXFP8."""
    from moegraph.ops.mx_mm import mx_backend

    for name, shape in shapes.items():
        backend, reason = mx_backend(shape.d_ff, shape.d_model, device)
        if backend != "triton":
            raise UsageError(f"--precision mxfp8, preset {name}: {reason}; --compile-only compiles its kernels")


def _names(text: str | None) -> Sequence[str]:
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def _status(found: Mapping[str, LayerReport]) -> int:
    status = 0
    for name, report in found.items():
        for row, what in report.wrong().items():
            say(f"preset {name}, {row}: not right, {', '.join(what)}")
            status = WRONG
    if any(report.failed for report in found.values()):
        return FAILED
    return status
