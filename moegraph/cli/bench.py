"""`moegraph bench`: how fast a training step, or one mixture-of-experts block, runs on this device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from moegraph.cli.bench_checkpoint import checkpoint_command
from moegraph.cli.bench_dispatch import dispatch_command
from moegraph.cli.bench_layer import layer_command
from moegraph.cli.bench_tune import tune_command
from moegraph.cli.options import Json, Set
from moegraph.cli.output import counted, print_json, print_table, say
from moegraph.cli.ranks import start_ranks, this_rank
from moegraph.cli.sources import find_spec
from moegraph.errors import UsageError

if TYPE_CHECKING:
    from moegraph.benchmarks.step import StepTiming

bench_app = typer.Typer(help="Measure speed on this device, with random inputs.", no_args_is_help=True)


@bench_app.command("step")
def step_command(
    spec: Annotated[str | None, typer.Argument(metavar="[SPEC]", help="The spec whose step is timed.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps that count, after a first one that compiles.")] = 12,
    set_: Set = None,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Start this many processes, as many as the layout has ranks.")
    ] = None,
    kernels: Annotated[
        int | None, typer.Option(min=1, help="On a GPU: also this many kernels of forward and backward, by time.")
    ] = None,
    balanced: Annotated[
        bool, typer.Option("--balanced", help="Give every expert as many tokens, as published speeds do.")
    ] = False,
    json: Json = False,
) -> int:
    """Time whole training steps of a spec on random tokens."""
    from moegraph.specs import load_spec

    name = find_spec(spec)
    loaded = load_spec(name, set_ or ())
    if balanced and loaded.model.moe is None:
        raise UsageError("--balanced has no effect: this model has no experts")
    ranks = this_rank(loaded.layout.world, nproc)
    if ranks is None:
        options = [f"--set={each}" for each in set_ or ()] + ["--json"] * json
        options += [f"--kernels={kernels}"] if kernels else []
        options += ["--balanced"] * balanced
        return start_ranks(loaded.layout.world, ["bench", "step", name, f"--steps={steps}", *options])
    from moegraph.benchmarks.step import time_step
    from moegraph.runtime.compile_cache import compile_cache
    from moegraph.runtime.device import choose_device, device_name, run_settings

    device = choose_device(loaded.train.device)
    if kernels and device.type != "cuda":
        raise UsageError("--kernels needs a GPU: there are none of its kernels here")
    if balanced:
        from moegraph.benchmarks.balanced_routing import register

        register()
    cache = compile_cache(device_name(device), inductor=loaded.train.compile == "inductor")
    with run_settings(loaded.train.deterministic), cache as keep_compiled:
        found = time_step(loaded, steps, *ranks)
        keep_compiled()
    if ranks[0] != 0:
        return 0
    if json:
        print_json(found.to_json())
        return 0
    _print_step(found)
    if kernels:
        _print_kernels(found, kernels)
    return 0


def _print_step(found: StepTiming) -> None:
    columns = [">ms", ">least ms", ">tokens/s", ">TFLOP/s", ">peak GiB", ">first step s", ">parameters"]
    columns += [">optimizer ms", ">of byte floor", "device"]
    row = [
        f"{found.milliseconds:.1f}",
        f"{found.least_milliseconds:.1f}",
        f"{found.tokens_per_second:,.0f}",
        f"{found.tflops:.3g}",
        f"{found.peak_bytes / 2**30:.1f}",
        f"{found.first_seconds:.1f}",
        counted(found.parameters),
        f"{found.optimizer_milliseconds:.2f}",
        f"{found.optimizer_milliseconds / found.optimizer_floor_milliseconds:.2f}",
        f"{found.ranks} × {found.device}",
    ]
    print_table(columns, [row])
    if found.communication_milliseconds is not None:
        say(
            "rows on their way, per block with experts and micro-batch: "
            f"{found.communication_milliseconds:.2f} ms, of which nothing hides {found.exposed_milliseconds:.2f} ms"
        )
    for way, seconds in found.overlap_seconds.items():
        say(f"overlap-communication {way}: {1e3 * seconds:.1f} ms for forward and backward")


def _print_kernels(found: StepTiming, count: int) -> None:
    say(
        f"forward and backward under the profiler: kernels {found.busy_milliseconds:.1f} ms, "
        f"none running {found.idle_milliseconds:.1f} ms"
    )
    rows = [[f"{k.milliseconds:.2f}", str(k.launches), k.name[:100]] for k in found.kernels[:count]]
    print_table([">ms", ">launches", "kernel"], rows)


bench_app.command("layer")(layer_command)
bench_app.command("dispatch")(dispatch_command)
bench_app.command("checkpoint")(checkpoint_command)
bench_app.command("tune")(tune_command)
