"""Read documents: text files, folders of them, JSONL, and Parquet.

Contract: `read_documents(inputs)` yields every document of the inputs, in order, one at a time, so that memory is
bounded by the largest single document. A folder is walked recursively in the order of the relative path; hidden files
and hidden folders are left out. The format follows the suffix: `.jsonl` and `.ndjson` hold one JSON object a line,
`.parquet` one document a row, and any other file is one UTF-8 text document. Nothing else is ever skipped: a file that
cannot be read as what its suffix says is a `DataError` that names it, with the line or row.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moegraph.errors import DataError

MAX_DOCUMENT_BYTES = 1 << 30
JSONL_SUFFIXES = (".jsonl", ".ndjson")
PARQUET_SUFFIX = ".parquet"
COMPRESSED_SUFFIXES = (".gz", ".bz2", ".xz", ".zst", ".zip")
PARQUET_ROWS_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Document:
    """One document: its text, and the file (with line or row) it came from, for messages."""

    text: str
    name: str


def read_documents(inputs: Iterable[Path], text_field: str = "text") -> Iterator[Document]:
    """Yield the documents of files and folders in order; `text_field` is the JSON key or Parquet column of the text.

    Raises DataError for a missing path, text that is not UTF-8, a bad JSONL line, a Parquet file without the column.
    """
    for path in inputs:
        for file in _files(Path(path)):
            yield from _read_file(file, text_field)


def document_digest(text: str) -> bytes:
    """SHA-256 of a document's UTF-8 text, 32 bytes: its identity, and what decides its split."""
    return hashlib.sha256(text.encode("utf-8")).digest()


def documents_digest(documents: Iterator[Document]) -> str:
    """SHA-256 over the digests of the documents in order, in hex: the identity of the whole input."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(document_digest(document.text))
    return digest.hexdigest()


def _files(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        yield path
        return
    found: list[Path] = []
    for folder, subfolders, names in os.walk(path):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        found.extend(Path(folder, name) for name in names if not name.startswith("."))
    if not found:
        raise DataError(f"{path} has no files: give a folder with text, JSONL or Parquet files", exit_code=2)
    yield from sorted(found, key=lambda file: file.relative_to(path).as_posix())


def _read_file(path: Path, text_field: str) -> Iterator[Document]:
    if not path.exists():
        raise DataError(f"{path} does not exist: give text, JSONL or Parquet files, or folders of them", exit_code=2)
    if not path.is_file():
        raise DataError(
            f"{path} is not a regular file: give text, JSONL or Parquet files, or folders of them", exit_code=2
        )
    suffix = path.suffix.lower()
    if suffix in COMPRESSED_SUFFIXES:
        raise DataError(f"{path} is compressed ({suffix}): unpack it first")
    try:
        if suffix in JSONL_SUFFIXES:
            yield from _read_jsonl(path, text_field)
        elif suffix == PARQUET_SUFFIX:
            yield from _read_parquet(path, text_field)
        else:
            yield Document(_read_text(path), str(path))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def _read_text(path: Path) -> str:
    with path.open("rb") as file:
        raw = file.read(MAX_DOCUMENT_BYTES + 1)
    if len(raw) > MAX_DOCUMENT_BYTES:
        raise DataError(f"{path} is one document of more than {MAX_DOCUMENT_BYTES} bytes: split it, or use JSONL")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text (byte {error.start}): convert it, or take it out") from error


def _read_jsonl(path: Path, text_field: str) -> Iterator[Document]:
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_DOCUMENT_BYTES + 1):
            number += 1
            name = f"{path}:{number}"
            if len(line) > MAX_DOCUMENT_BYTES:
                raise DataError(f"{name}: the line is longer than {MAX_DOCUMENT_BYTES} bytes")
            if line.strip():
                yield Document(_text_of(_parse_line(line, name), text_field, name), name)


def _parse_line(line: bytes, name: str) -> dict[str, Any]:
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(f"{name}: not UTF-8 text (byte {error.start} of the line)") from error
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise DataError(f"{name}: not a JSON object on one line: {reason}") from error
    if not isinstance(value, dict):
        raise DataError(f"{name}: a JSON object is wanted on each line, this is {type(value).__name__}")
    return value


def _text_of(record: dict[str, Any], text_field: str, name: str) -> str:
    if text_field not in record:
        keys = ", ".join(sorted(record)[:10]) or "none"
        raise DataError(f"{name}: no field {text_field!r}; its fields: {keys}")
    text = record[text_field]
    if not isinstance(text, str):
        raise DataError(f"{name}: field {text_field!r} holds {type(text).__name__}, not a string")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"{name}: field {text_field!r} holds half of a surrogate pair, which is not text") from error
    return text


def _read_parquet(path: Path, text_field: str) -> Iterator[Document]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise DataError(f"{path} needs pyarrow to be read: pip install 'moegraph[parquet]'") from error
    try:
        with parquet.ParquetFile(path) as file:
            schema = file.schema_arrow
            if text_field not in schema.names:
                raise DataError(f"{path}: no column {text_field!r}; its columns: {', '.join(schema.names[:10])}")
            kind = schema.field(text_field).type
            if kind not in (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view()):
                raise DataError(f"{path}: column {text_field!r} holds {kind}, not strings")
            row = 0
            for batch in file.iter_batches(batch_size=PARQUET_ROWS_AT_ONCE, columns=[text_field]):
                for value in batch.column(0):
                    name = f"{path} row {row}"
                    yield Document(_text_of({text_field: value.as_py()}, text_field, name), name)
                    row += 1
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise DataError(f"{path} is not a readable Parquet file: {error}") from error
