"""What a plain (unquoted) YAML scalar means: the core schema of YAML 1.2, section 10.3.

`1e-4` and `1.` are numbers, `010` is ten, `0o10` and `0x8` are eight; `on`, `yes`, `1:30`, `1_000` and dates are
strings, unlike in YAML 1.1.
"""

from __future__ import annotations

import re

from moegraph.specs.nodes import Plain

_NULL = {"", "~", "null", "Null", "NULL"}
_TRUE = {"true", "True", "TRUE"}
_FALSE = {"false", "False", "FALSE"}
_DECIMAL = re.compile(r"[-+]?[0-9]+")
_OCTAL = re.compile(r"0o[0-7]+")
_HEXADECIMAL = re.compile(r"0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_INFINITY = re.compile(r"([-+]?)\.(inf|Inf|INF)")
_NAN = {".nan", ".NaN", ".NAN"}
MAX_DIGITS = 100  # no setting needs more, and reading a decimal of n digits takes n² steps


def resolve(text: str) -> Plain:
    """The value of the plain scalar `text`; raises ValueError for a number of more than MAX_DIGITS digits."""
    if text in _NULL:
        return None
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    if not (text[0].isdigit() or text[0] in "+-."):
        return text
    return _number(text)


def _number(text: str) -> Plain:
    if _DECIMAL.fullmatch(text):
        return int(_bounded(text))
    if _OCTAL.fullmatch(text):
        return int(_bounded(text)[2:], 8)
    if _HEXADECIMAL.fullmatch(text):
        return int(_bounded(text)[2:], 16)
    if _FLOAT.fullmatch(text):
        return float(_bounded(text))
    if match := _INFINITY.fullmatch(text):
        return float("-inf" if match.group(1) == "-" else "inf")
    return float("nan") if text in _NAN else text


def _bounded(text: str) -> str:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a number may have at most {MAX_DIGITS} digits, this one has {len(text)}")
    return text
