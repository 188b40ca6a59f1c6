"""What commands print: tables, JSON, and lines about what is going on.

Contract: results go to stdout, everything else to stderr. Colour, boxes and moving lines only on a terminal that wants
them (`NO_COLOR`, no-color.org); elsewhere plain text, one row per line, never cut or wrapped.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from moegraph.runtime.progress import is_interactive


def say(text: str) -> None:
    """A line for the person at the terminal."""
    print(text, file=sys.stderr, flush=True)


def print_json(data: Any) -> None:
    """One JSON document on stdout. JSON has no NaN or infinity: they become null."""
    print(json.dumps(_finite(data), indent=2, ensure_ascii=False, allow_nan=False))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table on stdout. A column whose name starts with `>` is flush right."""
    right = [column.startswith(">") for column in columns]
    names = [column.removeprefix(">") for column in columns]
    cells = [[str(cell) for cell in row] for row in rows]
    if is_interactive(sys.stdout):
        _rich_table(names, cells, right)
        return
    widths = [max(map(len, column)) for column in zip(names, *cells, strict=True)]
    for row in [names, *cells]:
        padded = [
            cell.rjust(width) if flush else cell.ljust(width)
            for cell, width, flush in zip(row, widths, right, strict=True)
        ]
        print("  ".join(padded).rstrip())


def _rich_table(names: list[str], rows: list[list[str]], right: list[bool]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name, flush in zip(names, right, strict=True):
        table.add_column(Text(name), justify="right" if flush else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))  # as Text: brackets in a cell are not markup
    Console().print(table)


def print_diff(lines: Iterable[str]) -> None:
    """Lines of a unified diff on stdout, coloured on a terminal."""
    colours = {"+": "32", "-": "31", "@": "36"} if is_interactive(sys.stdout) else {}
    for line in lines:
        colour = colours.get(line[:1])
        print(f"\x1b[{colour}m{line}\x1b[0m" if colour else line)


class Status:
    """A line on stderr that says what is being done and is gone afterwards; nothing where there is no terminal."""

    def __init__(self, *, lines: bool = False) -> None:
        """`lines`: without a terminal, print each message as a line of its own instead of nothing."""
        self.moves = is_interactive(sys.stderr)
        self._lines = lines

    def __enter__(self) -> Status:
        return self

    def __exit__(self, *_: object) -> None:
        if self.moves:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def __call__(self, message: str) -> None:
        if self.moves:
            print(f"\r\x1b[K{message}", end="", file=sys.stderr, flush=True)
        elif self._lines:
            say(message)


def counted(number: float, *, operations: bool = False) -> str:
    """A count in short: parameters as people say them (46.9 B, 2.4 T), operations with SI prefixes (8.7 GFLOP)."""
    units = (" TFLOP", " GFLOP", " MFLOP", " kFLOP", " FLOP") if operations else (" T", " B", " M", " k", "")
    for size, unit in zip((1e12, 1e9, 1e6, 1e3), units, strict=False):
        if number >= size:
            return f"{number / size:.4g}{unit}"
    return f"{number:.4g}{units[-1]}"


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value
