"""`moegraph bench checkpoint`: how fast checkpoints are written and read on a disk, beside its own rate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from moegraph.cli.options import Json
from moegraph.cli.output import Status, print_json, print_table
from moegraph.errors import UsageError


def checkpoint_command(
    folder: Annotated[Path, typer.Argument(metavar="[FOLDER]", help="On the disk to measure. Default: here.")] = Path(),
    gib: Annotated[float, typer.Option(min=0.01, max=1024, help="Size of the checkpoint, GiB.")] = 4.0,
    rounds: Annotated[int, typer.Option(min=1, help="Turns; the least of each counts.")] = 2,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="Where the state is, and the steps beside a save.")
    ] = "auto",
    json: Json = False,
) -> int:
    """Time saving and loading a checkpoint of that size, and remove it."""
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder")
    import torch

    from moegraph.benchmarks.checkpoint import time_checkpoint
    from moegraph.runtime.device import choose_device

    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch sees no CUDA device here")

    with Status() as status:
        found = time_checkpoint(folder, int(gib * 2**30), rounds, status, choose_device(device))
    if json:
        print_json(found.to_json())
        return 0

    def row(what: str, seconds: float, share: str) -> list[str]:
        return [what, f"{seconds:.2f}", f"{found.bytes / seconds / 1e9:.2f}", share]

    rows = [
        row("disk: written and flushed", found.disk, ""),
        row("save: written, hashed and flushed", found.save, f"{100 * found.save_share:.0f} % of the disk's rate"),
        row("load, hashes not compared", found.load, ""),
        row("load, hashes compared", found.load_verified, f"{100 * found.verify_more:+.0f} %"),
        row("copy to host memory, for async", found.copy, f"{100 * found.stall_share:.0f} % of a save"),
    ]
    print_table(["what", ">seconds", ">GB/s", "beside"], rows)
    slower, longest = (100 * (each / found.step - 1) for each in (found.step_beside, found.step_longest))
    where = f"{found.threads} threads" if found.device.startswith("CPU") else found.device
    print(
        f"steps of {found.step:.2f} s of matrix products on {where}, while a save is written behind them: "
        f"{slower:+.0f} % of time, the longest {longest:+.0f} %"
    )
    return 0
