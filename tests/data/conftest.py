"""Small inputs that every data test shares."""

from __future__ import annotations

from pathlib import Path

import pytest

from moegraph.data.prepare import Prepared, prepare

from .small import sentence


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A folder of 60 small text files."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(60):
        (folder / f"{number:03d}.txt").write_text(sentence(number), encoding="utf-8")
    return folder


@pytest.fixture
def prepared(texts: Path, tmp_path: Path) -> Prepared:
    """The 60 files prepared, in several shards, a fifth of them held out."""
    return prepare([texts], output=tmp_path / "tokens", vocab_size=300, validation_fraction=0.2, shard_tokens=400)
