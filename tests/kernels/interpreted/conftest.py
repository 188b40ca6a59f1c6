"""These tests run only under TRITON_INTERPRET=1, which `tests/kernels/test_interpreter.py` sets for a process of its
own: Triton reads it when a kernel is defined."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent
collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]


MANY = 8  # cases of one test from which on a spread of two in five runs every day, and all in `make test-all`


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks three in five cases of a test with many as slow: 5 shares no factor with the numbers of values, so those
    that are left have every value of every parameter."""
    cases: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        if HERE in item.path.parents:
            cases.setdefault((str(item.path), item.name.partition("[")[0]), []).append(item)
    for each in cases.values():
        for number, item in enumerate(each):
            if len(each) >= MANY and number % 5 not in (0, 3):
                item.add_marker(pytest.mark.slow)
