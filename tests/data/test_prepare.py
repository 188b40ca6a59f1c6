"""Preparing data: the same inputs give the same bytes, and nothing half-written is ever left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moegraph.data import encode
from moegraph.data import prepare as module
from moegraph.data.corpora import CORPORA, resolve_source
from moegraph.data.dataset import TokenDataset
from moegraph.data.prepare import Prepared, Progress, prepare
from moegraph.data.sources import Document
from moegraph.data.tokenizer import train_tokenizer
from moegraph.errors import DataError

from .small import sentence


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def stream_of(dataset: TokenDataset) -> list[int]:
    return list(map(int, dataset.read(0, dataset.num_tokens)[0]))


def test_two_preparations_are_the_same_bytes_whatever_the_workers(texts: Path, tmp_path: Path) -> None:
    results = [
        prepare([texts], output=tmp_path / f"out{workers}", vocab_size=300, validation_fraction=0.2, workers=workers)
        for workers in (1, 3)
    ]
    assert results[0].manifest.fingerprint == results[1].manifest.fingerprint
    assert files_of(results[0].path) == files_of(results[1].path)


def test_every_document_comes_back_from_its_split(prepared: Prepared) -> None:
    found: list[str] = []
    for split in ("train", "validation"):
        dataset = TokenDataset.open(prepared.path, split)
        text = dataset.tokenizer().decode(stream_of(dataset))
        assert text.endswith("<|endoftext|>")
        found += text.split("<|endoftext|>")[:-1]
        assert dataset.num_documents == text.count("<|endoftext|>")
    assert sorted(found) == sorted(map(sentence, range(60)))
    assert len(prepared.manifest.splits.train.shards) > 2


def test_the_split_of_a_document_stays_when_documents_are_added(texts: Path, tmp_path: Path) -> None:
    def held_out(name: str) -> set[str]:
        result = prepare([texts], output=tmp_path / name, vocab_size=300, validation_fraction=0.3)
        dataset = TokenDataset.open(result.path, "validation")
        return set(dataset.tokenizer().decode(stream_of(dataset)).split("<|endoftext|>"))

    before = held_out("before")
    assert 5 < len(before) < 35
    for number in range(60, 90):
        (texts / f"{number:03d}.txt").write_text(sentence(number))
    after = held_out("after")
    assert {text for text in after if text in set(map(sentence, range(60))) | {""}} == before


def test_the_tokenizer_learns_nothing_from_held_out_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = [Document(sentence(number), str(number)) for number in range(60)]
    train = [d.text for d in documents if encode.split_of(encode.document_digest(d.text), 0.3) == "train"]
    monkeypatch.setitem(CORPORA, "small", lambda: iter(documents))
    result = prepare(corpus="small", output=tmp_path / "out", vocab_size=400, validation_fraction=0.3)
    assert (result.path / "tokenizer.json").read_bytes() == train_tokenizer(train, 400).serialized


def test_documents_without_tokens_are_left_out_and_counted(tmp_path: Path) -> None:
    lines = [{"text": text} for text in ("", sentence(1), "", sentence(2))]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    result = prepare([tmp_path / "a.jsonl"], output=tmp_path / "out", vocab_size=300, validation_fraction=0)
    assert (result.manifest.splits.train.documents, result.manifest.splits.train.empty_documents) == (2, 2)


def test_only_empty_documents_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(DataError, match="no training tokens in 1 documents"):
        prepare([tmp_path / "a.txt"], output=tmp_path / "out", vocab_size=300)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt"]


def test_a_long_document_is_encoded_in_pieces_and_stays_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(map(sentence, range(50)))
    (tmp_path / "a.txt").write_text(text)
    monkeypatch.setattr(encode, "PIECE_CHARACTERS", 200)
    monkeypatch.setattr(encode, "CHUNK_CHARACTERS", 150)
    result = prepare([tmp_path / "a.txt"], output=tmp_path / "out", vocab_size=300, validation_fraction=0)
    dataset = TokenDataset.open(result.path)
    assert dataset.num_documents == 1
    assert dataset.tokenizer().decode(stream_of(dataset)) == text + "<|endoftext|>"


def test_a_wide_vocabulary_is_stored_in_four_bytes(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocab = {f"w{number}": number for number in range(70_000)} | {"</s>": 70_000}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("w69999 w1 w65536")
    result = prepare(
        [tmp_path / "a.txt"], output=tmp_path / "out", tokenizer=tmp_path / "tokenizer.json", validation_fraction=0
    )
    assert result.manifest.dtype == "uint32"
    assert stream_of(TokenDataset.open(result.path)) == [69_999, 1, 65_536, 70_000]


def test_the_same_inputs_are_already_prepared_and_others_are_refused(prepared: Prepared, texts: Path) -> None:
    def again(**changes: object) -> Prepared:
        settings = {"vocab_size": 300, "validation_fraction": 0.2, "shard_tokens": 400} | changes
        return prepare([texts], output=prepared.path, **settings)  # type: ignore[arg-type]

    stamp = (prepared.path / "manifest.json").stat().st_mtime_ns
    assert again().already
    assert (prepared.path / "manifest.json").stat().st_mtime_ns == stamp
    with pytest.raises(DataError, match=r"prepared from other inputs: .*--force"):
        again(vocab_size=301)
    (texts / "000.txt").write_text("changed")
    with pytest.raises(DataError, match="prepared from other inputs"):
        again()
    replaced = again(force=True)
    assert not replaced.already
    assert replaced.manifest.fingerprint != prepared.manifest.fingerprint
    assert not list(prepared.path.parent.glob(".*"))


def test_a_damaged_folder_is_not_called_prepared_and_force_mends_it(prepared: Prepared, texts: Path) -> None:
    settings = {"vocab_size": 300, "validation_fraction": 0.2, "shard_tokens": 400}
    (prepared.path / "train-00000.tokens.bin").write_bytes(b"")
    with pytest.raises(DataError, match=r"is damaged, pass --force .*train-00000\.tokens\.bin"):
        prepare([texts], output=prepared.path, **settings)  # type: ignore[arg-type]
    (prepared.path / "manifest.json").write_text("{")
    mended = prepare([texts], output=prepared.path, force=True, **settings)  # type: ignore[arg-type]
    assert mended.manifest == prepared.manifest


def test_force_never_replaces_a_folder_with_anything_else_in_it(texts: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis/chapter.tex").write_text("years of work")
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match=r"holds 'chapter\.tex', which is not prepared data"):
        prepare([texts], output=tmp_path / "thesis", force=True)
    with pytest.raises(DataError, match="not a folder"):
        prepare([texts], output=tmp_path / "file", force=True)
    with pytest.raises(DataError, match="lies inside the input"):
        prepare([texts], output=texts / "tokens")
    assert (tmp_path / "thesis/chapter.tex").read_text() == "years of work"


@pytest.mark.parametrize("stage", ["train-tokenizer", "encode"])
@pytest.mark.parametrize("existing", [False, True])
def test_ctrl_c_leaves_what_was_there_and_nothing_else(
    texts: Path, tmp_path: Path, prepared: Prepared, stage: str, existing: bool
) -> None:
    output = prepared.path if existing else tmp_path / "fresh"
    before = sorted(path.name for path in tmp_path.iterdir())

    def interrupt(progress: Progress) -> None:
        if progress.stage == stage:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare([texts], output=output, vocab_size=290, force=True, progress=interrupt)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert TokenDataset.open(prepared.path).fingerprint == prepared.manifest.fingerprint


@pytest.mark.parametrize("trained", [True, False])
def test_a_bad_line_far_into_the_input_leaves_nothing(tmp_path: Path, trained: bool) -> None:
    (tmp_path / "tokenizer.json").write_bytes(train_tokenizer([sentence(1)], 300).serialized)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": sentence(n)}) + "\n" for n in range(50)) + "{bad\n")
    tokenizer = {} if trained else {"tokenizer": tmp_path / "tokenizer.json"}
    with pytest.raises(DataError, match=r"a\.jsonl:51"):
        prepare([tmp_path / "a.jsonl"], output=tmp_path / "out", **tokenizer)  # type: ignore[arg-type]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "tokenizer.json"]


def test_a_full_disk_is_one_sentence_and_leaves_nothing(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_manifest", full)
    with pytest.raises(DataError, match="cannot be written: No space left on device"):
        prepare([texts], output=tmp_path / "out", vocab_size=300)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["texts"]


def test_a_built_in_corpus_goes_to_the_cache_and_is_found_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    documents = [Document(sentence(number), str(number)) for number in range(60)]
    monkeypatch.setitem(CORPORA, "small", lambda: iter(documents))
    seen: list[Progress] = []
    result = prepare(corpus="small", progress=seen.append)
    assert result.path.parent == tmp_path / "cache/moegraph/corpora"
    assert resolve_source("corpus:small", tmp_path) == result.path
    assert prepare(corpus="small").already
    assert (seen[-1].stage, seen[-1].documents) == ("encode", 60)
    documents.append(Document("one more", "60"))
    with pytest.raises(DataError, match="not prepared yet"):
        resolve_source("corpus:small", tmp_path)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({}, "either inputs"),
        ({"inputs": ["a"], "corpus": "python-stdlib"}, "not both"),
        ({"inputs": ["a"]}, "name the output folder"),
        ({"corpus": "python-stdlib", "vocab_size": 512}, "stands for the default settings"),
        ({"inputs": ["a"], "output": "b", "tokenizer": "t", "vocab_size": 512}, "does not go with"),
        ({"inputs": ["a"], "output": "b", "eos_token": "t"}, "eos_token names"),
        ({"inputs": ["a"], "output": "b", "validation_fraction": 1.0}, r"outside \[0, 1\)"),
        ({"inputs": ["a"], "output": "b", "validation_fraction": float("nan")}, r"outside \[0, 1\)"),
        ({"inputs": ["a"], "output": "b", "workers": 0}, "workers 0"),
        ({"inputs": ["a"], "output": "b", "vocab_size": 0}, r"vocab_size 0 is outside \[257"),
        ({"inputs": ["a"], "output": "b", "vocab_size": 10**12}, "vocab_size 1000000000000 is outside"),
        ({"inputs": ["no-such"], "output": "b", "tokenizer": "t"}, "t is not a file"),
        ({"inputs": ["a"], "output": "b", "shard_tokens": 0}, "shard_tokens 0"),
        ({"corpus": "no-such"}, "no built-in corpus"),
    ],
)
def test_a_call_that_makes_no_sense_is_refused_with_status_2(call: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message) as error:
        prepare(**call)  # type: ignore[arg-type]
    assert error.value.exit_code == 2
