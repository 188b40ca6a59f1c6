"""Prepared tokens, a compile cache of the tests' own, and one pool of rank processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks import RankPool
from tests.runtime.conftest import own_cache, tokens

__all__ = ["own_cache", "ranks", "tokens"]


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    pool = RankPool(4)
    yield pool
    pool.close()
