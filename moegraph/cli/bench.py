"""`moegraph bench`: how fast a training step, or one mixture-of-experts block, runs on this device."""

from __future__ import annotations

from typing import Annotated

import typer

from moegraph.cli.bench_layer import layer_command
from moegraph.cli.bench_tune import tune_command
from moegraph.cli.options import Json, Set
from moegraph.cli.output import counted, print_json, print_table
from moegraph.cli.sources import find_spec
from moegraph.errors import UsageError

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
    from moegraph.benchmarks.step import time_step
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


bench_app.command("layer")(layer_command)
bench_app.command("tune")(tune_command)
