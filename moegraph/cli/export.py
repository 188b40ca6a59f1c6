"""`moegraph export`: a trained model as a Hugging Face model directory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moegraph.cli.options import Json, refuse
from moegraph.cli.output import Status, print_json, say
from moegraph.errors import DataError, ExportError, UsageError

if TYPE_CHECKING:
    from moegraph.export.architecture import Architecture
    from moegraph.export.model_directory import Exported
    from moegraph.export.source import Trained
    from moegraph.export.tokenizer import RunTokenizer
    from moegraph.specs import Spec


def export_command(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN|CHECKPOINT|SPEC",
            help="The folder of a run, or of one of its checkpoints; with --check also a spec.",
        ),
    ],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="DIR", help="The folder to write; absent or empty.")
    ] = None,
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
        float | None,
        typer.Option("--max-shard-gb", help="Gigabytes of weights in one file; default: 5.", min=1e-6, max=1e6),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Only say which architecture it is; exit status 3 if it is none.")
    ] = False,
    json: Json = False,
) -> None:
    """Write a trained model as a Hugging Face model directory.

    It holds config, weights under their published names, and tokenizer. The published architecture is found from the
    spec; where none computes exactly this model, that is said and nothing is written.
    """
    if check:
        unused = "is for writing a model, and --check writes none"
        refuse(output=output, dtype=dtype, max_shard_gb=max_shard_gb, because=unused)
        _check(run, step, architecture, json)
        return
    if output is None:
        raise UsageError("-o DIR is missing: name the folder to write, or use --check")
    from moegraph.export.architecture import choose
    from moegraph.export.architectures import ARCHITECTURES
    from moegraph.export.model_directory import DTYPES, check_new, default_dtype, export_trained
    from moegraph.export.source import find_trained
    from moegraph.export.writer import DEFAULT_SHARD_BYTES

    if dtype is not None and dtype not in DTYPES:
        raise ExportError(f"--dtype {dtype}: there are {', '.join(DTYPES)}")
    limit = DEFAULT_SHARD_BYTES if max_shard_gb is None else int(max_shard_gb * 1e9)
    check_new(output)
    trained = find_trained(Path(run), step)
    chosen = choose(trained.spec.model, ARCHITECTURES, architecture)
    dtype = dtype or default_dtype(trained.spec)
    tokenizer, notes = _tokenizer(trained)
    notes += [chosen.note(trained.spec.model), chosen.tokenizer_note if tokenizer is not None else ""]
    notes = [note for note in notes if note]
    with Status() as tick:
        written = export_trained(trained, chosen, output, dtype, tokenizer, limit, tick)
    if json:
        about = {"dtype": dtype, "tokenizer": tokenizer is not None, "notes": notes}
        print_json({"output": str(output), **_facts(chosen, trained, written), **about})
        return
    for note in notes:
        say(f"note: {note}")
    files, size = len(written.files), sum(written.files.values()) / 1e9
    what = f"{written.tensors} tensors in {files} file{'s' * (files > 1)}, {size:.3g} GB"
    checked = "hashes compared" if trained.verified else "final weights, which have no hash"
    print(f"{output}: {chosen.model_class}, step {trained.step}, {dtype}, {what}")
    print(f"from {trained.path} ({checked})")


def _facts(chosen: Architecture, trained: Trained, written: Exported) -> dict[str, object]:
    return {
        "architecture": chosen.name,
        "model_class": chosen.model_class,
        "source": str(trained.path),
        "step": trained.step,
        "verified": trained.verified,
        "tensors": written.tensors,
        "files": written.files,
    }


def _check(name: str, step: int | None, architecture: str | None, json: bool) -> None:
    """Says which architecture a spec or a run is. Raises ExportError with exit status 3 if it is none."""
    from moegraph.export.architecture import choose
    from moegraph.export.architectures import ARCHITECTURES

    spec = _spec(name, step)
    try:
        chosen = choose(spec.model, ARCHITECTURES, architecture)
    except ExportError as error:
        raise ExportError(str(error), exit_code=3) from error
    if json:
        print_json({"architecture": chosen.name, "model_class": chosen.model_class})
    else:
        print(f"{name}: {chosen.model_class} ({chosen.name})")


def _spec(name: str, step: int | None) -> Spec:
    from moegraph.artifact_names import REPORT_NAME
    from moegraph.cli.sources import find_spec, load

    if Path(name).is_dir() and not (Path(name) / REPORT_NAME).is_file():
        from moegraph.export.source import find_trained

        return find_trained(Path(name), step).spec
    refuse(step=step, because="is of a run, and this is a spec")
    return load(find_spec(name), None).spec


def _tokenizer(trained: Trained) -> tuple[RunTokenizer | None, list[str]]:
    """The tokenizer of the run's data; where they are no longer there, a note instead."""
    from moegraph.export.tokenizer import read_tokenizer

    try:
        return read_tokenizer(trained.spec.data.source, Path.cwd(), trained.data_fingerprint), []
    except DataError as error:
        return None, [f"no tokenizer is written, for want of the run's data in {Path.cwd()}: {error}"]
