"""`moegraph bench checkpoint`: how fast checkpoints are written and read on a disk, beside its own rate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moegraph.cli.options import Json
from moegraph.cli.output import Status, print_json, print_table
from moegraph.errors import UsageError


def checkpoint_command(
    folder: Annotated[Path, typer.Argument(metavar="[FOLDER]", help="On the disk to measure. Default: here.")] = Path(),
    gib: Annotated[float, typer.Option(min=0.01, max=1024, help="Size of the checkpoint, GiB.")] = 4.0,
    rounds: Annotated[int, typer.Option(min=1, help="Turns; the least of each counts.")] = 2,
    json: Json = False,
) -> int:
    """Time saving and loading a checkpoint of that size, and remove it."""
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder")
    from moegraph.benchmarks.checkpoint import time_checkpoint

    with Status() as status:
        found = time_checkpoint(folder, int(gib * 2**30), rounds, status)
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
        row("copy, that async waits for", found.copy, f"{100 * found.stall_share:.0f} % of a save"),
    ]
    print_table(["what", ">seconds", ">GB/s", "beside"], rows)
    slower = 100 * (found.step_beside / found.step - 1)
    print(f"matrix products on {found.threads} threads while a save is written behind them: {slower:+.0f} % of time")
    return 0
