"""Reading documents: what is read, in which order, and what is refused by name."""

from __future__ import annotations

import builtins
import json
import os
from pathlib import Path
from typing import Any

import pytest

from moegraph.data.corpora import CORPORA, corpus_documents, python_stdlib, resolve_source
from moegraph.data.sources import read_documents
from moegraph.errors import DataError
from moegraph.specs.schema.run import CORPORA as CORPORA_OF_SPECS


def texts_of(*paths: Path, field: str = "text") -> list[str]:
    return [document.text for document in read_documents(paths, field)]


def test_a_folder_is_read_recursively_in_path_order_without_hidden_files(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.txt", "a/.hidden.txt", ".git/config", "c.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert texts_of(tmp_path) == ["a/z.txt", "b.txt", "c.md"]


def test_text_is_read_verbatim_but_for_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\n")
    assert texts_of(tmp_path / "a.txt") == ["one\r\ntwo\n"]


def test_a_file_that_is_not_utf8_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(DataError, match=r"latin\.txt is not UTF-8 text \(byte 3\)"):
        texts_of(tmp_path / "latin.txt")


@pytest.mark.parametrize(
    ("name", "message"),
    [("absent.txt", "does not exist"), ("empty", "has no files"), ("pipe", "not a regular file"), ("a.gz", "unpack")],
)
def test_inputs_that_hold_no_documents_are_refused(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "a.gz").write_bytes(b"x")
    with pytest.raises(DataError, match=message):
        texts_of(tmp_path / name)


def test_jsonl_gives_the_text_field_of_each_line_and_skips_blank_lines(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one", "id": 1}\n\n{"text": "two\\n"}\n')
    (tmp_path / "b.jsonl").write_text('{"body": "three"}')
    assert texts_of(tmp_path / "a.jsonl") == ["one", "two\n"]
    assert texts_of(tmp_path / "b.jsonl", field="body") == ["three"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "cut', "not a JSON object"),
        (b'["text"]', "this is list"),
        (b'{"txt": "a"}', "no field 'text'; its fields: txt"),
        (b'{"text": 3}', "holds int"),
        (b'{"text": null}', "holds NoneType"),
        (b'{"text": "\\ud800"}', "half of a surrogate pair"),
        (b'{"text": "\xe9"}', "not UTF-8"),
        (b'{"text": ' + b"[" * 100_000, "nested too deeply"),
        (b'{"text": ' + b"1" * 10_000 + b"}", "not a JSON object"),
    ],
)
def test_a_bad_jsonl_line_is_refused_with_its_number(tmp_path: Path, line: bytes, message: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "fine"}\n' + line + b"\n")
    with pytest.raises(DataError, match=rf"a\.jsonl:2: .*{message}"):
        texts_of(tmp_path / "a.jsonl")


def write_parquet(path: Path, columns: dict[str, list[Any]]) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), path)
    return path


def test_parquet_gives_one_document_a_row(tmp_path: Path) -> None:
    rows = [f"row {number}" for number in range(200)]
    path = write_parquet(tmp_path / "a.parquet", {"id": list(range(200)), "text": rows})
    assert texts_of(path) == rows


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"body": ["a"]}, "no column 'text'; its columns: body"),
        ({"text": [1]}, "column 'text' holds int64, not strings"),
        ({"text": ["a", None]}, "row 1: field 'text' holds NoneType"),
    ],
)
def test_a_parquet_file_without_text_is_refused(tmp_path: Path, columns: dict[str, list[Any]], message: str) -> None:
    path = write_parquet(tmp_path / "a.parquet", columns)
    with pytest.raises(DataError, match=message):
        texts_of(path)


def test_a_file_that_is_no_parquet_is_refused_by_name(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 not really PAR1")
    with pytest.raises(DataError, match=r"a\.parquet is not a readable Parquet file"):
        texts_of(tmp_path / "a.parquet")


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").write_bytes(b"")
    real_import = builtins.__import__

    def without_pyarrow(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_pyarrow)
    with pytest.raises(DataError, match=r"pip install 'moegraph\[parquet\]'"):
        texts_of(tmp_path / "a.parquet")


def test_the_standard_library_corpus_leaves_out_tests_packages_and_undecodable_files(tmp_path: Path) -> None:
    for name in ("b.py", "a/c.py", "test/t.py", "a/tests/t.py", "site-packages/p.py", "_sysconfigdata_x.py", "n.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "latin.py").write_bytes(b"# caf\xe9")
    assert [document.name for document in python_stdlib(tmp_path)] == ["a/c.py", "b.py"]


def test_the_standard_library_corpus_is_about_twelve_megabytes() -> None:
    sizes = [len(document.text) for document in corpus_documents("python-stdlib")]
    assert len(sizes) > 400
    assert sum(sizes) > 8_000_000


def test_an_unknown_corpus_is_refused_with_the_known_names() -> None:
    with pytest.raises(DataError, match="known: python-stdlib; did you mean 'python-stdlib'") as error:
        corpus_documents("python-stdlb")
    assert error.value.exit_code == 2


def test_a_corpus_that_is_not_prepared_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(DataError, match="moegraph data prepare --corpus python-stdlib"):
        resolve_source("corpus:python-stdlib", tmp_path)


def test_a_source_folder_is_relative_to_the_base_and_must_be_prepared(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="moegraph data prepare INPUT -o data/tokens"):
        resolve_source("data/tokens", tmp_path)
    (tmp_path / "data/tokens").mkdir(parents=True)
    (tmp_path / "data/tokens/manifest.json").write_text(json.dumps({}))
    assert resolve_source("data/tokens", tmp_path) == tmp_path / "data/tokens"
    assert resolve_source(str(tmp_path / "data/tokens"), Path("/")) == tmp_path / "data/tokens"


def test_a_source_that_no_path_can_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="NUL"):
        resolve_source("a\0b", tmp_path)


def test_the_corpora_that_a_spec_may_name_are_those_that_exist() -> None:
    assert set(CORPORA_OF_SPECS) == set(CORPORA)
