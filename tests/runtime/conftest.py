"""Prepared tokens, and a compile cache of the tests' own."""

from __future__ import annotations

from pathlib import Path

import pytest

from moegraph.data.prepare import prepare
from tests.data.small import sentence


@pytest.fixture(scope="session")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds 200 small documents prepared as `tokens`, a fifth of them held out."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "texts").mkdir()
    for number in range(200):
        (folder / "texts" / f"{number:03d}.txt").write_text(sentence(number), encoding="utf-8")
    prepare([folder / "texts"], output=folder / "tokens", vocab_size=300, validation_fraction=0.2)
    return folder


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test touches the user's cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
