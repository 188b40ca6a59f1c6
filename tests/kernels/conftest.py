"""Tables for tests lie in a cache folder of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from moegraph.kernels.tuning import forget_choices


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder of the user; choices made with it are forgotten afterwards."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    forget_choices()
    yield tmp_path / "moegraph"
    forget_choices()
