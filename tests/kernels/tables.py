"""Tuning tables for tests: an entry of each kernel, and a card whose table nobody has."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from moegraph.kernels.chips import Card
from moegraph.kernels.config import Config, default_config
from moegraph.kernels.shapes import Problem
from moegraph.kernels.tuning_table import Entry, Table, write_table

CARD = Card("Test Card 9000", 90)
VERSIONS = {"moegraph": "0.1.0", "torch": "2.11.0", "triton": "3.6.0"}
PROBLEM = Problem("grouped_mm", torch.bfloat16, 2048, 1024, 4096, 16)


def entry(problem: Problem = PROBLEM, config: Config | None = None, **changes: Any) -> Entry:
    """An entry of `problem`'s class."""
    chosen = config or default_config(problem.kernel, problem.dtype, problem.n, problem.k)
    measured: dict[str, Any] = {
        "backend": "triton",
        "milliseconds": 2.0,
        "tflops": 500.0,
        "against": {"rule": 2.5},
        "versions": VERSIONS,
        "date": "2026-07-01",
    }
    return Entry(problem.shape, config=chosen, rows=problem.rows, experts=problem.experts, **{**measured, **changes})


def write(path: Path, entries: Iterable[Entry], card: Card = CARD) -> Path:
    """A table of these entries in a file."""
    write_table(path, Table(card, {}).with_entries(entries))
    return path
