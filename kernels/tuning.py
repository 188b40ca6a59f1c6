"""Which configuration a kernel runs with: measured where it was, else by rule; looked up once per launch shape.

    choose_config(kernel, dtype, n, k, rows, experts, where)
        1. the user's own table for this card      ~/.cache/moegraph/tuning/nvidia-h200.json, by `moegraph bench tune`
        2. the table shipped for this card         kernels/tables/h200.json
        3. the rule                                default_config

The choice says where it comes from and why. A table for another card is never used. Nothing here measures anything.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import torch

from moegraph.errors import RunError
from moegraph.kernels.chips import Card, card_of
from moegraph.kernels.config import Config, default_config, rule_reason
from moegraph.kernels.shapes import Problem, ShapeClass, rows_class
from moegraph.kernels.tuning_table import Entry, Table, read_table
from moegraph.user_cache import user_cache

Source = Literal["your table", "shipped table", "rule"]
SHIPPED = {"NVIDIA H200": "h200.json"}

_F = TypeVar("_F", bound=Callable[..., object])
_caches: list[Callable[[], None]] = []


class Choice(NamedTuple):
    """A configuration, where it comes from, and why."""

    config: Config
    source: Source
    reason: str


def cached_choice(function: _F) -> _F:
    """Decorator: remembers a choice for the rest of the process; `forget_choices` forgets all of them."""
    cached = functools.lru_cache(maxsize=4096)(function)
    _caches.append(cached.cache_clear)
    return cached  # type: ignore[return-value]


def forget_choices() -> None:
    """Tables are read again: for the process that has just written one, and for tests."""
    for clear in _caches:
        clear()


@cached_choice
def choose_config(
    kernel: str, dtype: torch.dtype, n: int, k: int, rows: int, experts: int, where: torch.device | Card
) -> Choice:
    """The configuration of `kernel` (one of `shapes.KERNELS`) for R = `rows` over `experts`, n output columns and a
    contraction over k, on a device or a card.

    Off CUDA (the interpreter) it is the rule's. Raises RunError if a table for the card cannot be used.
    """
    card = card_of(where) if isinstance(where, torch.device) else where
    if card is not None:
        found = measured(ShapeClass(kernel, dtype, n, k, rows_class(rows, experts)), card)
        if found is not None:
            source, entry = found
            return Choice(entry.config, source, entry.reason(card.name))
    capability = None if card is None else card.capability
    return Choice(default_config(kernel, dtype, n, k, capability or 90), "rule", rule_reason(dtype, capability))


def choose_for(problem: Problem, where: torch.device | Card) -> Choice:
    """`choose_config` of a problem."""
    p = problem
    return choose_config(p.kernel, p.dtype, p.n, p.k, p.rows, p.experts, where)


def measured(shape: ShapeClass, card: Card) -> tuple[Source, Entry] | None:
    """The first table's entry for a shape class, or None. Raises RunError if a table cannot be used."""
    for source, table in tables(card):
        if shape in table.entries:
            return source, table.entries[shape]
    return None


@cached_choice
def tables(card: Card) -> tuple[tuple[Source, Table], ...]:
    """The tables that hold for a card, the user's first. Raises RunError for one that is not what it should be."""
    return tuple((source, table_of(card, path)) for source, path in _files(card))


def table_digests(where: torch.device | Card) -> dict[str, str]:
    """SHA-256 of every table that holds for a device or a card, by its source: what a run says it was tuned with."""
    card = where if isinstance(where, Card) else card_of(where)
    if card is None:
        return {}
    return {source: hashlib.sha256(path.read_bytes()).hexdigest() for source, path in _files(card)}


def _files(card: Card) -> list[tuple[Source, Path]]:
    files: list[tuple[Source, Path]] = []
    if user_table(card.name).exists():
        files.append(("your table", user_table(card.name)))
    if card.name in SHIPPED:
        files.append(("shipped table", Path(str(resources.files("moegraph.kernels"))) / "tables" / SHIPPED[card.name]))
    return files


def table_of(card: Card, path: Path) -> Table:
    """The table in `path`. Raises RunError if it is not one, or another card's."""
    table = read_table(path)
    if table.card != card:
        name, capability = table.card
        raise RunError(
            f"the tuning table {path} is refused: it was measured on {name} (sm_{capability}), and this is {card.name} "
            f"(sm_{card.capability}); remove it, or measure again with `moegraph bench tune`"
        )
    return table


def user_table(card_name: str) -> Path:
    """Where the user's own table for a card lies, whether it is there or not."""
    slug = re.sub(r"[^a-z0-9]+", "-", card_name.lower()).strip("-")
    return user_cache() / "tuning" / f"{slug}.json"
