"""The tree a spec file is read into: plain values that remember where they stand.

A tree is made of `Scalar`, `Sequence` and `Mapping` nodes. Each node carries a `Mark` (file, line, column, counted
from 1) so that every later message and `inspect --resolved` can say where a value comes from. Trees are shared through
YAML aliases and never changed; `size` counts nodes as if aliases were written out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping as AbstractMapping
from dataclasses import dataclass, field
from typing import Any

from moegraph.errors import Problem

Plain = None | bool | int | float | str


@dataclass(frozen=True, slots=True)
class Mark:
    """Where a value was written. `line` 0 means that it stands in no file; `origin` then says where it comes from.

    `trusted` marks what the person running moegraph gave directly (on the command line or from Python), as opposed
    to what a spec file says.
    """

    origin: str
    line: int = 0
    column: int = 0
    trusted: bool = False

    def __str__(self) -> str:
        return f"{self.origin}:{self.line}:{self.column}" if self.line else self.origin


@dataclass(frozen=True, slots=True)
class Scalar:
    """A null, boolean, number or string. `text` is what was written if it was written plain (without quotes)."""

    value: Plain
    mark: Mark
    text: str | None = None
    size: int = 1


@dataclass(frozen=True, slots=True)
class Sequence:
    """A list."""

    items: tuple[Node, ...]
    mark: Mark
    size: int = 1


@dataclass(frozen=True, slots=True)
class Mapping:
    """A mapping; `keys` holds the mark of each key."""

    entries: dict[str, Node]
    mark: Mark
    keys: dict[str, Mark] = field(default_factory=dict)
    size: int = 1


Node = Scalar | Sequence | Mapping


def plain(node: Node) -> Any:
    """The node as None, bool, int, float, str, list or dict."""
    if isinstance(node, Scalar):
        return node.value
    if isinstance(node, Sequence):
        return [plain(item) for item in node.items]
    return {key: plain(value) for key, value in node.entries.items()}


def show(value: Any, limit: int = 60) -> str:
    """A value on one line as YAML would write it, cut to `limit` characters, with control characters escaped."""
    text = _short(value, limit)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def show_name(name: str) -> str:
    """A file name or an override as it was given, or quoted and cut if it would upset a terminal."""
    return name if name.isprintable() and len(name) <= 1000 else show(name)


def _short(value: Any, limit: int) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else (".inf" if value > 0 else "-.inf")
    if isinstance(value, int) and abs(value) >= 10**40:
        return f"a number of {int(math.log10(abs(value))) + 1} digits"
    if isinstance(value, int | float):
        return f"{value}"
    if isinstance(value, str):
        text = value[: limit + 1]
        return text if _is_plain_word(text) else json.dumps(text, ensure_ascii=not text.isprintable())
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_short(k, limit)}: {_short(v, limit)}" for k, v in list(value.items())[:8]) + "}"
    return "[" + ", ".join(_short(item, limit) for item in list(value)[:16]) + "]"


def _is_plain_word(text: str) -> bool:
    words = text.replace("_", "a").replace("-", "a").replace(".", "a").replace("/", "a")
    return words.isascii() and words.isalnum() and text[0].isalpha()


def from_python(value: Any, mark: Mark, problems: list[Problem], limits: Limits, path: str = "") -> Node:
    """The tree of a Python value; what a spec cannot hold is added to `problems` and replaced by null.

    Accepts None, bool, int, float, str, list, tuple and mappings with string keys.
    """
    return _Builder(mark, problems, limits).build(value, path, 1)


@dataclass(frozen=True, slots=True)
class Limits:
    """How large a spec may be; a real one stays below a hundredth of this."""

    bytes: int = 128 * 1024
    nodes: int = 20_000
    depth: int = 32
    aliases: int = 64


@dataclass(slots=True)
class _Builder:
    mark: Mark
    problems: list[Problem]
    limits: Limits
    count: int = 0

    def build(self, value: Any, path: str, depth: int) -> Node:
        self.count += 1
        if depth > self.limits.depth:
            return self._refuse("MG108", path, f"nested more than {self.limits.depth} levels deep")
        if self.count > self.limits.nodes:
            if self.count == self.limits.nodes + 1:
                self._refuse("MG108", "", f"more than {self.limits.nodes:,} values")
            return Scalar(None, self.mark)
        if value is None or isinstance(value, bool | int | float | str):
            return Scalar(value, self.mark)
        if isinstance(value, AbstractMapping):
            return self._mapping(value, path, depth)
        if isinstance(value, list | tuple):
            items = tuple(self.build(item, f"{path}[{i}]", depth + 1) for i, item in enumerate(value))
            return Sequence(items, self.mark, 1 + sum(item.size for item in items))
        return self._refuse("MG105", path, f"a spec cannot hold a Python {type(value).__name__}")

    def _mapping(self, value: AbstractMapping[Any, Any], path: str, depth: int) -> Node:
        entries: dict[str, Node] = {}
        for key, item in value.items():
            if not isinstance(key, str):
                self._refuse("MG105", path, f"the key {show(str(key))} is not a string")
                continue
            entries[key] = self.build(item, f"{path}.{key}" if path else key, depth + 1)
        size = 1 + sum(item.size for item in entries.values())
        return Mapping(entries, self.mark, dict.fromkeys(entries, self.mark), size)

    def _refuse(self, code: str, path: str, message: str) -> Scalar:
        self.problems.append(Problem(code, message, where=str(self.mark), path=path))
        return Scalar(None, self.mark)
