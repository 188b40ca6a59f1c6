"""Seeded damage to what lies on disk, and a limit on the memory that reading it may take."""

from __future__ import annotations

import random
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ODD: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**53, 2**63, 2**64, 10**30, 0.5, -0.0, 1e308, "", "a", "../x", "\0", "F32",
    "F64", "I8", [], [0], [-1, 4], [0, 2**62], [[0]], {}, {"a": 1}, "master.x[0:1]", "é" * 50,
]  # fmt: skip


@contextmanager
def within_memory(size: int) -> Iterator[None]:
    """Within, this process cannot have more than `size` bytes of address space beyond what it has now."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def mutate_tree(tree: Any, chance: random.Random) -> Any:
    """One part of a JSON value is replaced, removed, doubled or renamed."""
    places: list[tuple[Any, Any]] = []

    def walk(value: Any) -> None:
        if isinstance(value, dict | list):
            for key in value if isinstance(value, dict) else range(len(value)):
                places.append((value, key))
                walk(value[key])

    walk(tree)
    holder, key = chance.choice(places)
    what = chance.randrange(4)
    if what == 0 and isinstance(holder, dict):
        holder[str(chance.choice(ODD))] = holder.pop(key)
    elif what == 1:
        del holder[key]
    elif what == 2 and isinstance(holder, list):
        holder.insert(key, holder[key])
    elif what == 2 and isinstance(holder[key], int):
        holder[key] += chance.choice([-1, 1, 4, 1 << 20])
    else:
        holder[key] = chance.choice(ODD)
    return tree


def mutate_text(text: bytes, chance: random.Random) -> bytes:
    """Bytes are changed, cut or repeated, or something that JSON does not have is put in."""
    where = chance.randrange(len(text))
    what = chance.randrange(5)
    if what == 0:
        return text[:where] + bytes([chance.randrange(256)]) + text[where + 1 :]
    if what == 1:
        return text[:where]
    if what == 2:
        return text[:where] + text[where // 2 : where] + text[where:]
    if what == 3:
        return text[:where] + chance.choice([b"NaN", b"Infinity", b"1e999", b"9" * 5000, b'"\\ud800"']) + text[where:]
    return text[:where] + chance.choice([b"[", b'{"a":']) * 50_000 + text[where:]


def mutate_bytes(content: bytes, chance: random.Random) -> bytes:
    """Of a binary file: bits are flipped, it is cut or grows, or a word of it becomes an odd one."""
    where = chance.randrange(max(len(content), 1))
    what = chance.randrange(5)
    if what == 0:
        return content[:where] + bytes([content[where] ^ (1 << chance.randrange(8))]) + content[where + 1 :]
    if what == 1:
        return content[:where]
    if what == 2:
        return content + chance.randbytes(chance.randrange(1, 64))
    if what == 3:
        word = chance.choice([b"\0" * 8, b"\xff" * 8, b"\xff" * 7 + b"\x7f", b"\1" + b"\0" * 7, b"\0" * 7 + b"\1"])
        place = where // 8 * 8
        return content[:place] + word[: len(content) - place] + content[place + 8 :]
    return b""
