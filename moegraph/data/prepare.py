"""Turn documents into a folder of token shards: what `moegraph data prepare` does.

Steps:
1. Hash the documents, where the answer may already lie on disk; the same inputs prepared before are simply returned.
2. Load the given tokenizer.json, or train a BPE on the training documents (the first 2^28 characters of their text).
3. Encode on `workers` threads and append each document to the shards of its split (see `encode.split_of`).
4. Write the manifest and rename the folder into place.

The same documents and settings give the same files, byte for byte, whatever `workers` is.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moegraph.data.corpora import corpus_documents, corpus_folder
from moegraph.data.dataset import TokenDataset
from moegraph.data.encode import encode_documents, split_of
from moegraph.data.manifest import (
    DEFAULT_SHARD_TOKENS,
    DEFAULT_VALIDATION_FRACTION,
    DEFAULT_VOCAB_SIZE,
    MANIFEST_NAME,
    TOKENIZER_NAME,
    Inputs,
    Manifest,
    Splits,
    TokenizerEntry,
    dtype_for,
    new_manifest,
    write_manifest,
)
from moegraph.data.output_folder import check_replaceable, new_folder
from moegraph.data.shards import ShardWriter
from moegraph.data.sources import Document, document_digest, documents_digest, read_documents
from moegraph.data.tokenizer import TextTokenizer, check_vocab_size, load_tokenizer, train_tokenizer
from moegraph.errors import DataError

TRAINING_CHARACTERS = 256 << 20
MAX_WORKERS = 256
SECONDS_BETWEEN_REPORTS = 0.2


@dataclass(frozen=True)
class Progress:
    """How far a preparation is: the stage, and the documents and tokens it has dealt with so far."""

    stage: Literal["train-tokenizer", "encode"]
    documents: int
    tokens: int
    seconds: float


@dataclass(frozen=True)
class Prepared:
    """The result: the folder and its manifest. `already` says that it lay there before, with the same inputs."""

    path: Path
    manifest: Manifest
    already: bool


@dataclass(frozen=True)
class _Job:
    open_documents: Callable[[], Iterator[Document]]
    tokenizer: TextTokenizer | None
    settings: Inputs
    workers: int
    report: Callable[[Progress], None]


def prepare(
    inputs: Sequence[Path | str] = (),
    *,
    corpus: str | None = None,
    output: Path | str | None = None,
    tokenizer: Path | str | None = None,
    eos_token: str | None = None,
    vocab_size: int | None = None,
    validation_fraction: float = DEFAULT_VALIDATION_FRACTION,
    text_field: str = "text",
    shard_tokens: int = DEFAULT_SHARD_TOKENS,
    workers: int = 2,
    force: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> Prepared:
    """Prepare `inputs` (files and folders, see sources.py) or a built-in `corpus` into the folder `output`.

    `tokenizer` is the path of a tokenizer.json, whose end-of-document token `eos_token` may name; without it a BPE of
    `vocab_size` (4096) tokens is trained. `validation_fraction` is the expected share of documents held out.
    `output` may be left out for a built-in corpus with the default settings: it then goes to the user's cache folder,
    where `data.source: "corpus:NAME"` finds it. `progress` is called a few times a second.
    `force` replaces a folder that was prepared from other inputs.

    Raises DataError for a call that makes no sense, unreadable inputs, no documents, or an output in the way; nothing
    is left behind then, nor after Ctrl-C.
    """
    if bool(inputs) == (corpus is not None):
        raise DataError("give either inputs (files or folders) or a built-in corpus, and not both", exit_code=2)
    settings = _settings(tokenizer, eos_token, vocab_size, validation_fraction, shard_tokens)
    if not 1 <= workers <= MAX_WORKERS:
        raise DataError(f"workers {workers} is outside [1, {MAX_WORKERS}]", exit_code=2)
    loaded = None if tokenizer is None else load_tokenizer(Path(tokenizer), eos_token)
    if loaded is not None:
        settings = settings.model_copy(update={"tokenizer_sha256": loaded.sha256})
    paths = [Path(path) for path in inputs]

    def open_documents() -> Iterator[Document]:
        return read_documents(paths, text_field) if corpus is None else corpus_documents(corpus)

    target, known = _target(output, corpus, settings, open_documents)
    job = _Job(open_documents, loaded, known or settings, workers, progress or (lambda _: None))
    if known is not None and not force and (found := _already(target, known)) is not None:
        return found
    check_replaceable(target, force=force)
    _check_apart(target, paths)
    try:
        with new_folder(target, force=force) as partial:
            manifest = _fill(partial, job)
            if known is not None and manifest.inputs != known:
                raise DataError("the documents changed while they were read: prepare them again")
    except DataError:
        # Another process may have prepared the same corpus meanwhile: then its folder is as good as ours.
        if known is not None and not force and (found := _already(target, known)) is not None:
            return found
        raise
    return Prepared(target, manifest, already=False)


def _check_apart(target: Path, paths: Sequence[Path]) -> None:
    for path in paths:
        if path.is_dir() and target.resolve().is_relative_to(path.resolve()):
            raise DataError(f"the output {target} lies inside the input {path}: choose a folder apart", exit_code=2)


def _settings(
    tokenizer: Path | str | None, eos_token: str | None, vocab_size: int | None, fraction: float, shard_tokens: int
) -> Inputs:
    """The settings as an Inputs whose hashes are not known yet (zeros)."""
    if tokenizer is not None and vocab_size is not None:
        raise DataError(
            "vocab_size is the size of a tokenizer to train: it does not go with a given tokenizer", exit_code=2
        )
    if tokenizer is None and eos_token is not None:
        raise DataError("eos_token names a token of a given tokenizer: give the tokenizer.json too", exit_code=2)
    if not 0.0 <= fraction < 1.0:
        raise DataError(f"validation_fraction {fraction} is outside [0, 1)", exit_code=2)
    if not 1 <= shard_tokens <= 1 << 40:
        raise DataError(f"shard_tokens {shard_tokens} is outside [1, 2^40]", exit_code=2)
    if vocab_size is not None:
        check_vocab_size(vocab_size)
    trained = None if tokenizer is not None else DEFAULT_VOCAB_SIZE if vocab_size is None else vocab_size
    return Inputs(
        documents_sha256="0" * 64,
        vocab_size=trained,
        eos_token=eos_token,
        validation_fraction=float(fraction),
        shard_tokens=shard_tokens,
    )


def _target(
    output: Path | str | None,
    corpus: str | None,
    settings: Inputs,
    open_documents: Callable[[], Iterator[Document]],
) -> tuple[Path, Inputs | None]:
    """The folder to write, and the inputs with the documents' hash where something may already lie there."""
    if output is None:
        if corpus is None:
            raise DataError("name the output folder", exit_code=2)
        if settings != Inputs(documents_sha256="0" * 64):
            raise DataError(
                f"corpus:{corpus} stands for the default settings: name an output folder for other ones", exit_code=2
            )
        known = _with_documents(settings, documents_digest(open_documents()))
        return corpus_folder(corpus, known), known
    target = Path(output).absolute()
    if not (target / MANIFEST_NAME).is_file():
        return target, None
    return target, _with_documents(settings, documents_digest(open_documents()))


def _with_documents(settings: Inputs, digest: str) -> Inputs:
    return settings.model_copy(update={"documents_sha256": digest})


def _already(target: Path, inputs: Inputs) -> Prepared | None:
    """The folder at `target` if it was prepared from the same inputs and is whole; None if there is none."""
    if not (target / MANIFEST_NAME).is_file():
        return None
    try:
        manifest = TokenDataset.open(target, split="train", verify=False).manifest
    except DataError as error:
        raise DataError(f"{target} is damaged, pass --force to prepare it anew: {error}") from error
    if manifest.inputs != inputs:
        raise DataError(
            f"{target} was prepared from other inputs: choose another output folder, or pass --force", exit_code=2
        )
    return Prepared(target, manifest, already=True)


def _fill(folder: Path, job: _Job) -> Manifest:
    started = time.monotonic()
    tokenizer = job.tokenizer or _train(job, started)
    (folder / TOKENIZER_NAME).write_bytes(tokenizer.serialized)
    digest = hashlib.sha256()
    documents = tokens = 0
    next_report = started
    dtype, shard_tokens = dtype_for(tokenizer.vocab_size), job.settings.shard_tokens
    with ExitStack() as stack:
        train = ShardWriter(folder, "train", dtype, tokenizer.eos_id, shard_tokens)
        stack.callback(train.close)
        validation = ShardWriter(folder, "validation", dtype, tokenizer.eos_id, shard_tokens)
        stack.callback(validation.close)
        writers = {"train": train, "validation": validation}
        pieces = stack.enter_context(closing(encode_documents(job.open_documents(), tokenizer, job.workers)))
        for piece in pieces:
            writers[split_of(piece.digest, job.settings.validation_fraction)].append(piece.ids, last=piece.last)
            tokens += piece.ids.size
            if piece.last:
                digest.update(piece.digest)
                documents += 1
            if (now := time.monotonic()) >= next_report:
                job.report(Progress("encode", documents, tokens, now - started))
                next_report = now + SECONDS_BETWEEN_REPORTS
        splits = Splits(train=train.finish(), validation=validation.finish())
    if not splits.train.shards:
        raise DataError(f"no training tokens in {documents} documents: give documents that hold text")
    job.report(Progress("encode", documents, tokens, time.monotonic() - started))
    entry = TokenizerEntry(
        sha256=tokenizer.sha256,
        vocab_size=tokenizer.vocab_size,
        eos_token=tokenizer.eos_token,
        eos_id=tokenizer.eos_id,
    )
    manifest = new_manifest(_with_documents(job.settings, digest.hexdigest()), entry, splits)
    write_manifest(manifest, folder)
    return manifest


def _train(job: _Job, started: float) -> TextTokenizer:
    assert job.settings.vocab_size is not None
    return train_tokenizer(_training_texts(job, started), job.settings.vocab_size)


def _training_texts(job: _Job, started: float) -> Iterable[str]:
    """The text the tokenizer learns from: training documents in order, none held out, until there is enough."""
    characters = 0
    for number, document in enumerate(job.open_documents()):
        if split_of(document_digest(document.text), job.settings.validation_fraction) == "train":
            yield document.text
            characters += len(document.text)
        if number % 64 == 0:
            job.report(Progress("train-tokenizer", number + 1, 0, time.monotonic() - started))
        if characters >= TRAINING_CHARACTERS:
            return
