"""Spec files from somebody who means harm: refused in sentences, fast and in little memory, or loaded."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from moegraph.errors import SpecError
from moegraph.specs import Spec, load_spec
from moegraph.specs.sources import PRESETS
from tests.mutations import within_memory

LIMIT = 384 << 20  # bytes of address space
TEXT = (PRESETS / "tiny.yaml").read_bytes()
BOMB = b"a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + b"".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n".encode() for n in range(1, 12)
)
NUMBERS = [
    b"9" * 4000,
    b"1e999999",
    b"-0x" + b"f" * 500,
    b"0o" + b"7" * 900,
    b"." + b"0" * 3000 + b"1",
    b".inf",
    b".nan",
]
LINES = TEXT.splitlines(keepends=True)
PAIRS = [number for number, line in enumerate(LINES) if b": " in line and not line.strip().startswith(b"#")]


def attack(chance: random.Random) -> bytes:
    """The preset with one or two things done to it."""
    lines = list(LINES)
    for _ in range(chance.choice([1, 1, 2])):
        number = chance.choice(PAIRS)
        key, _, value = lines[number].partition(b": ")
        indent = key[: len(key) - len(key.lstrip())]
        what = chance.randrange(14)
        if what == 0:
            return BOMB + b"".join(lines)
        if what == 1:  # a value that refers to itself, or to everything
            lines[number] = key + b": &x [*x, " + b"*x, " * chance.randrange(2000) + b"*x]\n"
        elif what == 2:
            opening, size = chance.choice([b"[", b"{a: ", b"- ", b"? "]), chance.choice([50, 5_000, 50_000])
            lines[number] = key + b": " + opening * size + b"\n"
        elif what == 3:
            lines[number] = key + b": " + chance.choice(NUMBERS) + b"\n"
        elif what == 4:
            lines.insert(number, lines[number])
        elif what == 5:
            lines[number] = lines[number] * chance.randrange(2, 3000)
        elif what == 6:
            odd = [
                b"[1, 2]",
                b"{a: b}",
                b"null",
                b"'text'",
                b"-1",
                b"1.5",
                b"true",
                b"2026-01-01",
                b"!!binary aGk=",
                b"",
            ]
            lines[number] = key + b": " + chance.choice(odd) + b"\n"
        elif what == 7:
            where = chance.randrange(len(lines[number]))
            odd = [
                b"\0",
                b"\xff",
                b"\xc0\xaf",
                b"\xed\xa0\x80",
                b"\xef\xbb\xbf",
                b"\x1b[2J",
                b"\x85",
                b"\xe2\x80\xa8",
                b"\r",
            ]
            lines[number] = lines[number][:where] + chance.choice(odd) + lines[number][where:]
        elif what == 8:
            lines[number] = key + b": !!python/object/apply:os.system ['true']\n"
        elif what == 9:
            lines[number] = key + b": " + b"x" * chance.choice([1_000, 900_000, 3_000_000]) + b"\n"
        elif what == 10:
            lines.insert(number, b"".join(indent + b"k%d: {}\n" % n for n in range(chance.choice([10, 60_000]))))
        elif what == 11:
            lines.insert(number, indent + b"<<: *nothing\n")
        elif what == 12:
            lines[number] = key + b": |" + chance.choice([b"9", b"+-", b"\n"]) + value * chance.randrange(1, 500)
        else:
            lines.insert(
                0,
                chance.choice(
                    [b"%YAML 9.9\n---\n", b"---\n---\n", b"%TAG ! tag:x,1:\n", b"--- !x\n", b"extends: [a]\n"]
                ),
            )
    return b"".join(lines)


def refusal(path: Path) -> str | None:
    """What is wrong with it, or None where it is a spec."""
    try:
        assert isinstance(load_spec(path), Spec)
    except SpecError as error:
        return str(error)
    return None


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 17))])
def test_hostile_specs(tmp_path: Path, seed: int) -> None:
    chance, path = random.Random(seed), tmp_path / "moegraph.yaml"
    refused = 0
    for _ in range(60):
        path.write_bytes(attack(chance))
        began = time.process_time()
        with within_memory(LIMIT):
            said = refusal(path)
        assert time.process_time() - began < 5
        refused += said is not None
        assert said is None or (said.replace("\n", "").isprintable() and len(said) < 50_000), said[:300]
    assert refused > 35
