"""`moegraph checkpoint`: which checkpoints a run has, what is in one, and whether its files are whole."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moegraph.cli.options import Json
from moegraph.cli.output import Status, print_json, print_table
from moegraph.errors import CheckpointError

if TYPE_CHECKING:
    from moegraph.checkpoint.manifest import Manifest
    from moegraph.checkpoint.reader import Checkpoint

app = typer.Typer(rich_markup_mode=None, no_args_is_help=True, help="List, verify and show the checkpoints of a run.")

Run = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")]
Which = Annotated[
    Path, typer.Argument(metavar="RUN|CHECKPOINT", help="The folder of a checkpoint, or a run's for its newest.")
]


@app.command("list")
def list_command(run: Run, json: Json = False) -> None:
    """The checkpoints of a run, oldest first. Their manifests are read, their data are not."""
    from moegraph.checkpoint.start import list_steps

    rows = [_row(step, folder) for step, folder in list_steps(run).items()]
    if json:
        print_json({"run": str(run), "checkpoints": rows})
        return
    if not rows:
        print(f"{run} has no checkpoint yet")
        return
    columns = ["step", "saved", "layout", "loss", "bytes"]
    cells = [[row[name] if row[name] is not None else "–" for name in columns] for row in rows]
    print_table([">step", "saved", "layout", ">loss", ">size"], [[*c[:3], _loss(c[3]), _size(c[4])] for c in cells])
    for row in rows:
        if row["problem"] is not None:
            print(f"step {row['step']}: {row['problem']}")


@app.command("verify")
def verify_command(which: Which, json: Json = False) -> None:
    """Read every file of a checkpoint and compare it with its hash. Exit status 3 names the first that is damaged."""
    from moegraph.checkpoint.reader import Checkpoint
    from moegraph.checkpoint.start import find_checkpoint

    folder = find_checkpoint(which)
    try:
        with Status() as status:
            checkpoint = Checkpoint.open(folder)
            checkpoint.verify(tick=lambda name: status(f"reading {name}"))
    except CheckpointError as error:
        raise CheckpointError(str(error), exit_code=3) from error
    manifest = checkpoint.manifest
    if json:
        print_json({"checkpoint": str(folder), "step": manifest.step, "files": len(manifest.files), "whole": True})
    else:
        files = f"{len(manifest.files)} shard file{'s' * (len(manifest.files) > 1)}"
        print(f"{folder}: whole; step {manifest.step}, {files}, {_size(manifest.total_bytes)}")


@app.command("show")
def show_command(
    which: Which,
    json: Json = False,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor with its shape and parts.")] = False,
) -> None:
    """What a checkpoint holds. Headers are checked, hashes are not: that is what `verify` does."""
    from moegraph.checkpoint.reader import Checkpoint
    from moegraph.checkpoint.start import find_checkpoint

    checkpoint = Checkpoint.open(find_checkpoint(which))
    if json:
        print_json({"checkpoint": str(checkpoint.folder), "manifest": checkpoint.manifest.model_dump()})
    elif tensors:
        _print_tensors(checkpoint)
    else:
        _print_summary(checkpoint)


def _row(step: int, folder: Path) -> dict[str, Any]:
    from moegraph.checkpoint.manifest import read_manifest

    row: dict[str, Any] = dict.fromkeys(("saved", "layout", "loss", "bytes", "problem"))
    try:
        manifest = read_manifest(folder)
        row.update(
            saved=_printable(manifest.saved),
            layout=_layout(manifest),
            loss=manifest.numbers.loss,
            bytes=manifest.total_bytes,
        )
    except CheckpointError as error:
        row["problem"] = str(error)
    return {"step": step, "folder": str(folder), **row}


def _print_summary(checkpoint: Checkpoint) -> None:
    manifest = checkpoint.manifest
    masters = [entry.numel for name, entry in manifest.tensors.items() if name.startswith("master.")]
    numbers, data = manifest.numbers, manifest.data
    versions = ", ".join(f"{_printable(name)} {_printable(each)}" for name, each in manifest.versions.items())
    print(f"checkpoint  {checkpoint.folder}")
    print(f"run         {manifest.run}, step {manifest.step}, saved {_printable(manifest.saved)}")
    print(f"layout      {_layout(manifest)}, {_printable(manifest.layout.schedule)}")
    print(f"parameters  {sum(masters):,} in {len(masters)} tensors; {_size(manifest.total_bytes)} with their moments")
    print(f"data        {data.samples:,} samples, epoch {data.epoch}, seed {data.seed}, {data.fingerprint[:16]}…")
    print(f"loss        {_loss(numbers.loss)}, grad_norm {_loss(numbers.grad_norm)}, lr {numbers.lr:.2e}")
    print(f"versions    {versions}")
    for name, entry in manifest.files.items():
        print(f"file        {name}  {_size(entry.bytes)}  sha256 {entry.sha256}")


def _print_tensors(checkpoint: Checkpoint) -> None:
    rows = [
        [name, entry.dtype, " × ".join(map(str, entry.shape)), len(checkpoint.places[name])]
        for name, entry in checkpoint.manifest.tensors.items()
    ]
    print_table(["tensor", "dtype", "shape", ">parts"], rows)


def _layout(manifest: Manifest) -> str:
    layout = manifest.layout
    return f"dp {layout.dp} ep {layout.ep} pp {layout.pp}"


def _loss(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float | int) else value


def _size(value: Any) -> str:
    if not isinstance(value, int):
        return str(value)
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.2f} MiB"


def _printable(text: str) -> str:
    """Text from a file that anyone may have written, made safe for a terminal."""
    from moegraph.specs.nodes import show_name

    return show_name(text)
