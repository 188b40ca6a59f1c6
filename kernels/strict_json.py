"""Reading JSON that has to be exactly what it should be: small checks, put together into the shape of a document.

    check = object_of({"n": whole(1, 100), "name": matching("[a-z]+", "a word")})
    check(parse(raw), "the document")    raises Refused: the document.n must be a whole number from 1 to 100, not 0

A check takes a value and where it stands; it returns nothing, or raises Refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

Check = Callable[[Any, str], None]


class Refused(Exception):
    """What is wrong, and where in the document."""


def parse(raw: bytes) -> Any:
    """The value of a JSON document. Raises Refused if it is none, repeats a key, or has NaN or infinity."""
    try:
        return json.loads(raw, object_pairs_hook=_object, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:  # ValueError: of JSON, of UTF-8, of too many digits
        raise Refused(f"it is not JSON ({error})") from error


def whole(least: int, most: int) -> Check:
    """An integer within bounds; a truth value is none."""

    def check(value: Any, where: str) -> None:
        good = type(value) is int and least <= value <= most
        _need(good, where, f"a whole number from {least} to {most}", value)

    return check


def one_of(*values: object) -> Check:
    """One of these values, and of their type."""

    def check(value: Any, where: str) -> None:
        good = any(type(value) is type(each) and value == each for each in values)
        _need(good, where, f"one of {', '.join(map(str, values))}", value)

    return check


def positive(value: Any, where: str) -> None:
    """A number above zero, at most 10¹²."""
    _need(type(value) in (int, float) and 0 < value <= 1e12, where, "a positive number", value)


def matching(pattern: str, what: str) -> Check:
    """A string that matches a regular expression as a whole."""

    def check(value: Any, where: str) -> None:
        _need(isinstance(value, str) and re.fullmatch(pattern, value) is not None, where, what, value)

    return check


def anything(kind: type, what: str) -> Check:
    """Any value of a type."""

    def check(value: Any, where: str) -> None:
        _need(type(value) is kind, where, what, value)

    return check


def object_of(checks: Mapping[str, Check], *, partial: bool = False) -> Check:
    """An object with these keys and no others, all of them unless `partial`."""

    def check(value: Any, where: str) -> None:
        _need(isinstance(value, dict), where, "an object", value)
        for unknown in value.keys() - checks.keys():
            raise Refused(f"{where} has the unknown key {unknown[:60]!r}")
        for missing in checks.keys() - value.keys():
            if not partial:
                raise Refused(f"{where} lacks {missing!r}")
        for key, each in value.items():
            checks[key](each, f"{where}.{key}")

    return check


def _need(holds: bool, where: str, wanted: str, value: Any) -> None:
    if not holds:
        raise Refused(f"{where} must be {wanted}, not {json.dumps(value)[:60]}")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise Refused("a key stands twice in one object")
    return found


def _no_constant(text: str) -> None:
    raise Refused(f"{text} is not a number of JSON")
