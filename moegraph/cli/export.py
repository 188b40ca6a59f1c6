"""`moegraph export`: a trained model as a Hugging Face model directory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moegraph.cli.options import Json
from moegraph.cli.output import Status, print_json, say
from moegraph.errors import DataError, ExportError

if TYPE_CHECKING:
    from moegraph.export.source import Trained
    from moegraph.export.tokenizer import RunTokenizer


def export_command(
    run: Annotated[
        Path, typer.Argument(metavar="RUN|CHECKPOINT", help="The folder of a run, or of one of its checkpoints.")
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="DIR", help="The folder to write; absent or empty.")
    ],
    step: Annotated[
        int | None, typer.Option("--step", help="The checkpoint of this step; default: the newest.")
    ] = None,
    architecture: Annotated[
        str | None,
        typer.Option("--architecture", metavar="NAME", help="Write this model_type, or say what does not fit."),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="bfloat16 or float32; default: what the model was trained in.")
    ] = None,
    max_shard_gb: Annotated[
        float, typer.Option("--max-shard-gb", help="Gigabytes of weights in one file.", min=1e-6, max=1e6)
    ] = 5.0,
    json: Json = False,
) -> None:
    """Write a trained model for transformers and others: config, weights under their published names, tokenizer.

    The published architecture is found from the spec; where none computes exactly this model, that is said and nothing
    is written.
    """
    from moegraph.export.architecture import choose
    from moegraph.export.architectures import ARCHITECTURES
    from moegraph.export.model_directory import DTYPES, check_new, default_dtype, export_trained
    from moegraph.export.source import find_trained

    if dtype is not None and dtype not in DTYPES:
        raise ExportError(f"--dtype {dtype}: there are {', '.join(DTYPES)}")
    check_new(output)
    trained = find_trained(run, step)
    chosen = choose(trained.spec.model, ARCHITECTURES, architecture)
    dtype = dtype or default_dtype(trained)
    tokenizer, notes = _tokenizer(trained)
    notes += [note for note in [chosen.note(trained.spec.model)] if note]
    with Status() as status:
        limit = int(max_shard_gb * 1e9)
        written = export_trained(
            trained, chosen, output, dtype=dtype, tokenizer=tokenizer, max_shard_bytes=limit, tick=status
        )
    if json:
        print_json(
            {
                "output": str(output),
                "architecture": chosen.name,
                "model_class": chosen.model_class,
                "source": str(trained.path),
                "step": trained.step,
                "verified": trained.verified,
                "dtype": dtype,
                "tensors": written.tensors,
                "files": written.files,
                "tokenizer": tokenizer is not None,
                "notes": notes,
            }
        )
        return
    for note in notes:
        say(f"note: {note}")
    files, size = len(written.files), sum(written.files.values()) / 1e9
    what = f"{written.tensors} tensors in {files} file{'s' * (files > 1)}, {size:.3g} GB"
    checked = "hashes compared" if trained.verified else "final weights, which have no hash"
    print(f"{output}: {chosen.model_class}, step {trained.step}, {dtype}, {what}")
    print(f"from {trained.path} ({checked})")


def _tokenizer(trained: Trained) -> tuple[RunTokenizer | None, list[str]]:
    """The tokenizer of the run's data; where they are no longer there, a note instead."""
    from moegraph.export.tokenizer import read_tokenizer

    try:
        return read_tokenizer(trained.spec.data.source, Path.cwd(), trained.data_fingerprint), []
    except DataError as error:
        return None, [f"no tokenizer is written, for want of the run's data in {Path.cwd()}: {error}"]
