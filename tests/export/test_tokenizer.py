"""transformers gives text the ids that the model was trained on, whatever the architecture's usual tokenizer."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from moegraph.data.tokenizer import TextTokenizer, train_tokenizer
from moegraph.export.architecture import choose
from moegraph.export.architectures import ARCHITECTURES
from moegraph.export.model_directory import write_model
from moegraph.export.tokenizer import RunTokenizer
from tests.export.models import MODELS, random_values, reader, spec_of

TEXT = "def hello(x):\n    return 'World''s' + x  # é1234\r\n"
EVERYDAY = ("mixtral", "glm4_moe", "qwen2", "llama")


@cache
def trained() -> TextTokenizer:
    return train_tokenizer(["def f(x): return x + 1\n" * 20, "hello World's 123  4\n\n"] * 5, 300)


@pytest.mark.parametrize(
    "name", [name if name in EVERYDAY else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_text_has_the_ids_of_the_runs_tokenizer(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.24")
    ours, spec = trained(), spec_of(name, "model.vocab_size=300")
    architecture = choose(spec.model, ARCHITECTURES)
    written = RunTokenizer(ours.serialized, ours.eos_token, ours.eos_id)
    write_model(tmp_path, spec.model, architecture, reader(random_values(spec)), "float32", written)
    auto = transformers.AutoTokenizer.from_pretrained(tmp_path)
    fast = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    expected = ours.encode_batch([TEXT])[0].tolist()
    assert fast(TEXT)["input_ids"] == expected
    assert fast.decode(expected) == TEXT
    assert (fast.eos_token_id, fast.bos_token, fast.pad_token) == (ours.eos_id, None, None)
    assert fast.model_max_length == spec.model.max_seq_len
    # transformers overrules the file for some architectures; that of ours is said when one is written.
    assert (auto(TEXT)["input_ids"] == expected) == (not architecture.tokenizer_note)
