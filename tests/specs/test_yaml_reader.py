"""The reader takes YAML 1.2's core schema, remembers places, and refuses everything else in a sentence."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from moegraph.errors import Problem
from moegraph.specs.nodes import Limits, Mapping, Sequence, plain
from moegraph.specs.yaml_reader import read_yaml


def read(text: str | bytes, limits: Limits | None = None) -> tuple[Any, list[Problem]]:
    problems: list[Problem] = []
    node = read_yaml(text, "s.yaml", problems, limits or Limits())
    return (None if node is None else plain(node)), problems


def refusal(text: str | bytes, limits: Limits | None = None) -> Problem:
    _, problems = read(text, limits)
    assert len(problems) == 1, problems
    return problems[0]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("1.", 1.0),
        (".5", 0.5),
        ("-2", -2),
        ("010", 10),
        ("0o10", 8),
        ("0x10", 16),
        ("1.10", 1.1),
        ("on", "on"),
        ("Yes", "Yes"),
        ("off", "off"),
        ("1:30", "1:30"),
        ("1_000", "1_000"),
        ("2024-01-01", "2024-01-01"),
        ("true", True),
        ("FALSE", False),
        ("~", None),
        ("", None),
        ("null", None),
        ("'1'", "1"),
        ('"true"', "true"),
        (".inf", math.inf),
        ("-.inf", -math.inf),
        ("1e400", math.inf),
        ("-inf", "-inf"),
        ("0b1", "0b1"),
        ("+12", 12),
        ("e5", "e5"),
        (".", "."),
    ],
)
def test_scalars_follow_the_core_schema(text: str, value: object) -> None:
    data, problems = read(f"a: {text}")
    assert not problems
    assert data["a"] == value
    assert type(data["a"]) is type(value)


def test_nan_is_a_number() -> None:
    assert math.isnan(read("a: .nan")[0]["a"])


def test_json_is_read_as_it_is() -> None:
    value = {"a": [1, 2.5, None, True, {"b": "é\n\t"}], "c": {}}
    assert read(json.dumps(value)) == (value, [])


def test_every_key_and_value_knows_its_place() -> None:
    problems: list[Problem] = []
    node = read_yaml("a: 1\nb:\n  - x\n  - {c: 2}\n", "s.yaml", problems, Limits())
    assert isinstance(node, Mapping)
    assert str(node.entries["a"].mark) == "s.yaml:1:4"
    assert str(node.keys["b"]) == "s.yaml:2:1"
    items = node.entries["b"]
    assert isinstance(items, Sequence)
    inner = items.items[1]
    assert isinstance(inner, Mapping)
    assert str(inner.keys["c"]) == "s.yaml:4:6"
    assert str(inner.entries["c"].mark) == "s.yaml:4:9"


def test_duplicate_keys_are_refused_with_both_places() -> None:
    problem = refusal("a: 1\nb: {x: 1, x: 2}\n")
    assert problem.where == "s.yaml:2:11"
    assert "`x` stands here twice, first at line 2, column 5" in problem.message


@pytest.mark.parametrize(
    "text", ["a: !!python/object/apply:os.system [ls]", "a: !!str 1", "a: !x y", "a: ! z", "!!map {a: 1}", "!t a: 1"]
)
def test_tags_are_refused(text: str) -> None:
    assert "the tag" in refusal(text).message


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("<<: {a: 1}", "merge keys"),
        ("1: a", "a key must be a name, this is 1"),
        ("true: a", "a key must be a name, this is true"),
        ("? [a]\n: b", "a key must be a name, this is a list or mapping"),
        ("a: *x", "refers to an anchor that was not defined before"),
        ("a: &x [1, *x]", "stands inside what it refers to"),
        ("a: 1\n---\nb: 2", "a second document"),
        ("%YAML 1.1\n---\na: 1", "read as YAML 1.2"),
        ("%TAG ! tag:x,2000:\n---\na: 1", "%TAG"),
        ("a: [1", "not closed"),
        ("\ta: 1", "a tab"),
        ("a: b: c", "a `:` that cannot stand here"),
        ("a: 'x", "in the middle of a value"),
        ('a: "\\q"', "escape"),
        ('a: "\\UFFFFFFFF"', "cannot be read as YAML"),
        ("a: @x", "cannot start a value"),
        ("a: " + "9" * 5000, "at most 100 digits"),
        (b"a: \xff", "byte 3 (0xff) is not UTF-8"),
        (b"a: 1\nb: \x00", "control character U+0000"),
        ("a: 1".encode("utf-16"), "is not UTF-8"),
    ],
)
def test_what_is_refused_says_why(text: str | bytes, sentence: str) -> None:
    problem = refusal(text)
    assert sentence in problem.message
    assert problem.line >= 1
    assert problem.column >= 1


def test_a_byte_order_mark_is_no_part_of_the_text() -> None:
    assert read(b"\xef\xbb\xbfa: 1") == ({"a": 1}, [])


def test_reading_goes_on_after_what_is_refused() -> None:
    data, problems = read("a: !x 1\na: 2\n<<: {}\nb: 3\n")
    assert [each.line for each in problems] == [1, 2, 3]
    assert data == {"a": 1, "b": 3}


def test_limits_on_bytes_values_depth_and_aliases() -> None:
    assert "at most 100 bytes" in refusal("a" * 101, Limits(bytes=100)).message
    assert "more than 10 values" in refusal("[" + "1, " * 20 + "]", Limits(nodes=10)).message
    assert "more than 5 levels deep" in refusal("[" * 6 + "]" * 6, Limits(depth=5)).message
    assert read("[" * 5 + "]" * 5, Limits(depth=5))[1] == []
    assert "more than 3 aliases" in refusal("a: &x 1\nb: [*x, *x, *x, *x]", Limits(aliases=3)).message


def test_aliases_count_as_what_they_stand_for() -> None:
    bomb = "a: &a [1,1,1,1,1,1,1,1,1]\n" + "".join(
        f"{after}: &{after} [{', '.join([f'*{before}'] * 9)}]\n"
        for before, after in zip("abcdefg", "bcdefgh", strict=True)
    )
    assert "more than 20,000 values" in refusal(bomb).message
    assert read("a: &x {k: 1}\nb: *x")[0] == {"a": {"k": 1}, "b": {"k": 1}}
