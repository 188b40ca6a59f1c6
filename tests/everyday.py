"""Which of many like cases are tried every day; `make test-all` tries them all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def everyday(cases: Iterable[Any], every: int = 2, first: int = 0) -> list[Any]:
    """The cases as parameters: of each `every` in a row the one at `first` is tried every day, the others are slow."""
    found = []
    for i, case in enumerate(cases):
        given = (
            case if hasattr(case, "marks") else pytest.param(*case) if isinstance(case, tuple) else pytest.param(case)
        )
        marks = given.marks if i % every == first else (*given.marks, pytest.mark.slow)
        found.append(pytest.param(*given.values, id=given.id, marks=marks))
    return found
