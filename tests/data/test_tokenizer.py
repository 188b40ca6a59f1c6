"""Tokenizers: any tokenizer.json loads or is refused clearly, and a trained BPE is the same every time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import moegraph.data.tokenizer as module
from moegraph.data.tokenizer import load_tokenizer, one_thread_per_call, train_tokenizer
from moegraph.errors import DataError

TEXTS = [f"def function_{number}(self): return self.value + {number}\n" for number in range(200)]


def write_word_tokenizer(path: Path, *end_tokens: str) -> Path:
    """A word-level tokenizer.json that adds a start token, cuts to 4 ids and pads to 8, as published ones may."""
    vocab = {word: number for number, word in enumerate(["<s>", "[UNK]", "one", "two", "three", *end_tokens])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>", *end_tokens])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(path))
    return path


def test_a_loaded_tokenizer_adds_cuts_and_pads_nothing(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_word_tokenizer(tmp_path / "tokenizer.json", "</s>"))
    ids = tokenizer.encode_batch(["one two three one two three", "one"])
    assert [part.tolist() for part in ids] == [[2, 3, 4, 2, 3, 4], [2]]
    assert (tokenizer.eos_token, tokenizer.eos_id, tokenizer.vocab_size) == ("</s>", 5, 6)


def test_the_end_token_is_asked_for_when_it_is_not_clear(tmp_path: Path) -> None:
    none = write_word_tokenizer(tmp_path / "none.json")
    with pytest.raises(DataError, match="none of the usual ones: name it with --eos-token"):
        load_tokenizer(none)
    assert load_tokenizer(none, "three").eos_id == 4
    two = write_word_tokenizer(tmp_path / "two.json", "</s>", "<eos>")
    with pytest.raises(DataError, match="several"):
        load_tokenizer(two)
    with pytest.raises(DataError, match="no token '<end>'"):
        load_tokenizer(two, "<end>")


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"\xff\xfe", b'{"version": "1.0", "model": {"type": "BPE"}}', b"[" * 100_000]
)
def test_a_file_that_is_no_tokenizer_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(DataError, match=r"tokenizer\.json is not a tokenizer\.json that"):
        load_tokenizer(tmp_path / "tokenizer.json")


def test_a_huge_or_missing_tokenizer_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with (tmp_path / "huge.json").open("wb") as file:
        file.truncate(10 << 30)  # sparse: 10 GB that take no room
    with pytest.raises(DataError, match="larger than"):
        load_tokenizer(tmp_path / "huge.json")
    with pytest.raises(DataError, match="is not a file"):
        load_tokenizer(tmp_path)


def test_training_twice_gives_the_same_bytes_and_decodes_what_it_encoded() -> None:
    first, second = train_tokenizer(TEXTS, 400), train_tokenizer(TEXTS, 400)
    assert first.serialized == second.serialized
    assert (first.vocab_size, first.eos_id, first.eos_token) == (400, 0, "<|endoftext|>")
    text = "  def é \U0001f600\t\r\n"
    assert first.decode(first.encode_batch([text])[0].tolist()) == text


def test_text_cannot_forge_the_end_of_document() -> None:
    tokenizer = train_tokenizer(TEXTS, 400)
    ids = tokenizer.encode_batch(["a <|endoftext|> b"])[0].tolist()
    assert tokenizer.eos_id not in ids
    assert tokenizer.decode(ids) == "a <|endoftext|> b"


@pytest.mark.parametrize("vocab_size", [256, 0, -1, (1 << 20) + 1])
def test_a_vocabulary_too_small_or_too_large_is_refused(vocab_size: int) -> None:
    with pytest.raises(DataError, match=f"vocab_size {vocab_size} is outside"):
        train_tokenizer(TEXTS, vocab_size)


@pytest.mark.parametrize("before", [None, "true"])
def test_the_environment_is_put_back(monkeypatch: pytest.MonkeyPatch, before: str | None) -> None:
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    if before is not None:
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", before)
    with one_thread_per_call():
        assert os.environ["TOKENIZERS_PARALLELISM"] == "false"
    assert os.environ.get("TOKENIZERS_PARALLELISM") == before


def test_ids_beyond_the_largest_vocabulary_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LARGEST_VOCAB", 5)
    with pytest.raises(DataError, match="token ids up to 5"):
        load_tokenizer(write_word_tokenizer(tmp_path / "tokenizer.json", "</s>"))
