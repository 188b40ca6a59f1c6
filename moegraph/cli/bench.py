"""`moegraph bench`: how fast a training step, or one mixture-of-experts block, runs on this device."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from moegraph.cli.options import Json, Set
from moegraph.cli.output import counted, print_json, print_table
from moegraph.cli.sources import find_spec
from moegraph.errors import UsageError

PRESETS = {  # tokens, d_model, d_ff, experts, top_k
    "A": (32768, 2048, 1024, 128, 8),
    "C": (32768, 4096, 1536, 64, 4),
    "D": (32768, 2048, 768, 128, 8),
    "Q": (32768, 4096, 1536, 128, 8),
    "wide": (16384, 4096, 4096, 16, 4),
}

bench_app = typer.Typer(help="Measure speed on this device, with random inputs.", no_args_is_help=True)


@bench_app.command("step")
def step_command(
    spec: Annotated[str | None, typer.Argument(metavar="[SPEC]", help="The spec whose step is timed.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps that count, after a first one that compiles.")] = 12,
    set_: Set = None,
    json: Json = False,
) -> None:
    """Time whole training steps of a spec on random tokens."""
    from moegraph.specs import load_spec

    loaded = load_spec(find_spec(spec), set_ or ())
    if loaded.layout.world > 1:
        one = '--set "layout={dp: 1, ep: 1, pp: 1, transport: exact}"'
        raise UsageError(f"layout asks for {loaded.layout.world} ranks; {one} times one")
    from moegraph.runtime.benchmark import time_step
    from moegraph.runtime.compile_cache import compile_cache
    from moegraph.runtime.device import choose_device, device_name, run_settings

    device = choose_device(loaded.train.device)
    cache = compile_cache(device_name(device), inductor=loaded.train.compile == "inductor")
    with run_settings(loaded.train.deterministic), cache as keep_compiled:
        found = time_step(loaded, steps)
        keep_compiled()
    if json:
        print_json(found.to_json())
        return
    columns = [">ms", ">least ms", ">tokens/s", ">TFLOP/s", ">peak GiB", ">first step s", ">parameters", "device"]
    row = [
        f"{found.milliseconds:.1f}",
        f"{found.least_milliseconds:.1f}",
        f"{found.tokens_per_second:,.0f}",
        f"{found.tflops:.3g}",
        f"{found.peak_bytes / 2**30:.1f}",
        f"{found.first_seconds:.1f}",
        counted(found.parameters),
        found.device,
    ]
    print_table(columns, [row])


@bench_app.command("layer")
def layer_command(
    preset: Annotated[str, typer.Option(help=f"One of {', '.join(PRESETS)}: the shape, unless given below.")] = "A",
    tokens: Annotated[int | None, typer.Option(min=1)] = None,
    d_model: Annotated[int | None, typer.Option(min=8)] = None,
    d_ff: Annotated[int | None, typer.Option(min=8)] = None,
    experts: Annotated[int | None, typer.Option(min=1)] = None,
    top_k: Annotated[int | None, typer.Option(min=1)] = None,
    skew: Annotated[float, typer.Option(min=0.0, help="Standard deviation of a bias per expert.")] = 0.0,
    backward: Annotated[bool, typer.Option("--backward", help="Forward and backward.")] = False,
    repeats: Annotated[int, typer.Option(min=1)] = 15,
    json: Json = False,
) -> None:
    """Time the experts of one block, fused and as separate operators, in turn with a dense product (CUDA, bf16)."""
    if preset not in PRESETS:
        raise UsageError(f"--preset {preset}: one of {', '.join(PRESETS)}")
    given = (tokens, d_model, d_ff, experts, top_k)
    names = ("tokens", "d_model", "d_ff", "experts", "top_k")
    shape = {n: g if g is not None else p for n, g, p in zip(names, given, PRESETS[preset], strict=True)}
    if shape["top_k"] > shape["experts"]:
        raise UsageError(f"--top-k {shape['top_k']} is more than --experts {shape['experts']}")
    from moegraph.runtime.benchmark import time_layer

    found = time_layer(**shape, skew=skew, backward=backward, repeats=repeats)
    if json:
        print_json({"shape": shape, "skew": skew, "backward": backward, "rows": [asdict(row) for row in found]})
        return
    rows = [
        [row.name, f"{row.milliseconds:.3f}", f"{row.tflops:.0f}", f"{100 * row.share_of_dense:.1f} %"] for row in found
    ]
    print_table(["", ">ms", ">TFLOP/s", ">of dense"], rows)
