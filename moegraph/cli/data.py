"""`moegraph data`: text becomes token shards, and what such a folder holds."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moegraph.cli.options import Json
from moegraph.cli.output import Status, print_json, print_table

if TYPE_CHECKING:
    from moegraph.data.manifest import Manifest
    from moegraph.data.prepare import Progress

_SECONDS_BETWEEN_LINES = 5.0

app = typer.Typer(rich_markup_mode=None, no_args_is_help=False, help="Prepare training data, or show it.")


@app.command("prepare")
def prepare_command(
    inputs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[INPUT]...", help="Text, JSONL or Parquet files, or folders of them."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="DIR", help="Where to write; not needed for a --corpus as it comes."),
    ] = None,
    corpus: Annotated[str | None, typer.Option(help="A built-in corpus instead of INPUT: python-stdlib.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(metavar="FILE", help="A Hugging Face tokenizer.json.")] = None,
    eos_token: Annotated[str | None, typer.Option(help="The token of --tokenizer that ends a document.")] = None,
    vocab_size: Annotated[int | None, typer.Option(help="Train a BPE of this many tokens (default 4096).")] = None,
    validation_fraction: Annotated[float, typer.Option(help="Expected share of documents held out.")] = 0.02,
    text_field: Annotated[str, typer.Option(help="The field of JSONL and Parquet rows that holds the text.")] = "text",
    workers: Annotated[int, typer.Option(help="Threads that encode.")] = 2,
    force: Annotated[bool, typer.Option("--force", help="Replace data prepared from other inputs.")] = False,
    json: Json = False,
) -> None:
    """Turn text into token shards with a fingerprinted manifest."""
    from moegraph.data.prepare import prepare

    with Status(lines=True) as status:
        prepared = prepare(
            inputs or [],
            corpus=corpus,
            output=output,
            tokenizer=tokenizer,
            eos_token=eos_token,
            vocab_size=vocab_size,
            validation_fraction=validation_fraction,
            text_field=text_field,
            workers=workers,
            force=force,
            progress=_Report(status),
        )
    if json:
        print_json({"already": prepared.already, **_facts(prepared.path, prepared.manifest)})
        return
    print("already prepared, nothing to do" if prepared.already else "prepared")
    _show(prepared.path, prepared.manifest)


@app.command("show")
def show_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that `data prepare` wrote.")],
    check: Annotated[bool, typer.Option("--verify", help="Also read everything and check every hash and id.")] = False,
    json: Json = False,
) -> None:
    """Show what a prepared folder holds."""
    from moegraph.data.dataset import TokenDataset
    from moegraph.data.manifest import read_manifest

    manifest = read_manifest(folder)
    if check:
        for split in ("train", "validation"):
            if manifest.split(split).shards:
                TokenDataset.open(folder, split, verify=True)
    if json:
        print_json({**_facts(folder, manifest), "verified": check})
        return
    _show(folder, manifest)
    if check:
        print("every hash, offset and id is right")


class _Report:
    """Progress of a preparation: often on a terminal's moving line, a line every few seconds elsewhere."""

    def __init__(self, status: Status) -> None:
        self._status, self._next, self._stage = status, 0.0, ""

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        if progress.stage == self._stage and now < self._next and not self._status.moves:
            return
        self._stage, self._next = progress.stage, now + _SECONDS_BETWEEN_LINES
        stage = {"train-tokenizer": "reading for the tokenizer", "encode": "encoding"}[progress.stage]
        plural = "" if progress.documents == 1 else "s"
        tokens = f", {progress.tokens:,} tokens" if progress.tokens else ""
        self._status(f"{stage}: {progress.documents:,} document{plural}{tokens}, {progress.seconds:.1f} s")


def _facts(folder: Path, manifest: Manifest) -> dict[str, Any]:
    splits = {
        name: {
            "documents": split.documents,
            "tokens": split.tokens,
            "shards": len(split.shards),
            "empty_documents": split.empty_documents,
        }
        for name, split in (("train", manifest.splits.train), ("validation", manifest.splits.validation))
    }
    return {
        "path": str(folder),
        "fingerprint": manifest.fingerprint,
        "tokenizer": manifest.tokenizer.model_dump(mode="json"),
        "dtype": manifest.dtype,
        "splits": splits,
    }


def _show(folder: Path, manifest: Manifest) -> None:
    facts = _facts(folder, manifest)
    print_table(
        ["split", ">documents", ">tokens", ">shards", ">empty documents"],
        [[name, *(f"{value:,}" for value in split.values())] for name, split in facts["splits"].items()],
    )
    tokenizer = manifest.tokenizer
    end = f"{tokenizer.eos_token!r} (id {tokenizer.eos_id})"
    print(f"vocabulary  {tokenizer.vocab_size:,} tokens, documents end with {end}")
    print(f"fingerprint {manifest.fingerprint}")
    print(f"folder      {folder}")
