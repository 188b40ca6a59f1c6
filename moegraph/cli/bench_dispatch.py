"""`moegraph bench dispatch`: rows to their experts' ranks and back, as transport `direct` and through NCCL."""

from __future__ import annotations

import os
from typing import Annotated, Literal

import typer

from moegraph.cli.options import Json
from moegraph.cli.output import print_json, print_table, say
from moegraph.cli.rank_environment import LAUNCHED, environment_ranks, watch_launcher
from moegraph.cli.ranks import start_ranks
from moegraph.errors import RunError, UsageError

WRONG = 3


def dispatch_command(
    nproc: Annotated[int | None, typer.Option(min=2, help="Start this many ranks on this host. Default: 2.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each rank.")] = 16384,
    d_model: Annotated[int, typer.Option(min=8)] = 4096,
    experts: Annotated[int, typer.Option(min=1, help="Of the model; ranks share them out.")] = 32,
    top_k: Annotated[int, typer.Option(min=1)] = 4,
    capacity: Annotated[float, typer.Option(min=1.0, help="Rows of a buffer, in balanced loads.")] = 1.25,
    repeats: Annotated[int, typer.Option(min=1, help="Turns; every turn runs each row three times.")] = 15,
    device: Annotated[
        Literal["cuda", "cpu"], typer.Option(help="cpu tries small shapes: direct runs as its equivalent over gloo.")
    ] = "cuda",
    json: Json = False,
) -> int:
    """Time dispatch and return of rows between ranks, forward and backward, in turn in the same processes.

    Exit status 3 if ways do not give the same bits.
    """
    ranks = environment_ranks()
    if LAUNCHED in os.environ:
        watch_launcher()
    if ranks is not None and nproc is not None:
        raise UsageError("--nproc starts processes, but RANK and WORLD_SIZE are set: this is one of them already")
    world = ranks[1] if ranks is not None else nproc or 2
    if experts % world or world < 2:
        raise UsageError(f"--experts {experts} on {world} ranks: at least 2 ranks, among which experts divide")
    if top_k > experts:
        raise UsageError(f"--top-k {top_k} is more than --experts {experts}")
    if ranks is None:
        sizes = {"tokens": tokens, "d-model": d_model, "experts": experts, "top-k": top_k, "capacity": capacity}
        options = [f"--{name}={value}" for name, value in {**sizes, "repeats": repeats, "device": device}.items()]
        return start_ranks(world, ["bench", "dispatch", *options, *["--json"] * json])
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise RunError("bench dispatch needs CUDA devices and torch sees none; --device cpu tries a small shape")
    from moegraph.benchmarks.dispatch import time_dispatch
    from moegraph.runtime.device import choose_device
    from moegraph.runtime.mesh import join
    from moegraph.specs.schema import Layout

    where = choose_device(device)
    with join(Layout(dp=world, ep=world, transport="direct"), ranks[0], world, where) as mesh:
        found = time_dispatch(
            mesh,
            where,
            tokens=tokens,
            width=d_model,
            experts=experts,
            top_k=top_k,
            capacity=capacity,
            repeats=repeats,
            report=say,
        )
    if ranks[0] == 0 and json:
        print_json(found.to_json())
    elif ranks[0] == 0:
        versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
        say(f"{world} × {found.device}; {versions}")
        say(", ".join(f"{name} {value}" for name, value in found.shape.items()))
        columns = ["way", "stage", ">ms", ">least ms", ">GB/s"]
        print_table(
            columns,
            [
                (
                    row.way,
                    row.stage,
                    f"{row.milliseconds:.3f}",
                    f"{row.least_milliseconds:.3f}",
                    f"{row.gigabytes_per_second:.0f}",
                )
                for row in found.rows
            ],
        )
    unequal = [way for way, same in found.equal.items() if not same]
    if unequal and ranks[0] == 0:
        say(f"not the same bits as nccl: {', '.join(unequal)}")
    return WRONG if unequal else 0
