"""From a tree to a Spec: every problem at once, in our own sentences.

pydantic skips a section's own checks once one of its fields fails, and its messages are made for programmers. So the
tree is walked here, section by section, and only single values are given to pydantic (strictly, as JSON: "4" is no
number and `on` no boolean). What parses is kept: `Parsed.spec` is a Spec with holes where a value failed, so that the
rules that need only the rest can still be checked. Reading a hole raises AttributeError.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar, cast

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from moegraph.errors import Problem
from moegraph.specs.fields import choices, describe, field_type, keys, kind_of, kinds, shape_of
from moegraph.specs.nodes import Mapping, Node, Scalar, Sequence, plain, show
from moegraph.specs.schema.base import Section
from moegraph.specs.schema.spec import Spec
from moegraph.specs.suggest import nearest_key, nearest_word
from moegraph.specs.yaml_reader import problem_at


@dataclass(slots=True)
class Parsed:
    """What came of a tree. `spec` is a Spec, with holes unless `whole`; `data` its values as written, converted."""

    spec: Spec
    data: dict[str, Any]
    whole: bool
    problems: list[Problem] = field(default_factory=list)


def parse_spec(root: Mapping) -> Parsed:
    """Validate a tree against the schema; cross-field rules are another step (`rules.py`)."""
    parser = _Parser()
    spec, data = parser.section(Spec, root, "")
    return Parsed(spec, data, not parser.problems, parser.problems)


S = TypeVar("S", bound=Section)


class _Failed(Exception):
    """A value failed; its problem has been recorded."""


@lru_cache(maxsize=1024)
def _adapter(annotation: Any) -> TypeAdapter[Any]:
    return TypeAdapter(annotation, config=ConfigDict(allow_inf_nan=False))


class _Parser:
    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def section(self, cls: type[S], node: Mapping, path: str) -> tuple[S, dict[str, Any]]:
        """An instance of `cls` with holes where values failed, and the values that did parse as plain data."""
        known = keys(cls)
        good: dict[str, Any] = {}
        data: dict[str, Any] = {}
        holes: list[str] = []
        meant = self._unknown_keys(known, node, path)
        for key, (name, info) in known.items():
            if key in node.entries:
                try:
                    good[name], data[key] = self.value(field_type(info), node.entries[key], _join(path, key))
                except _Failed:
                    holes.append(name)
            elif info.is_required():
                holes.append(name)
                if key not in meant:
                    self._missing(node, _join(path, key), info)
        instance = cast(S, cls.model_construct(None, **good))
        for name in holes:
            instance.__dict__.pop(name, None)
        return instance, data

    def value(self, annotation: Any, node: Node, path: str) -> tuple[Any, Any]:
        """The parsed value and its plain form; records the problem and raises _Failed if there is one."""
        shape = shape_of(annotation)
        if isinstance(node, Scalar) and node.value is None and shape.nullable:
            return None, None
        if isinstance(node, Mapping) and shape.sections:
            return self.section(self._choose(annotation, shape.sections, node, path), node, path)
        if isinstance(node, Mapping) and shape.values is not None:
            named = {key: self.value(shape.values, each, _join(path, key)) for key, each in node.entries.items()}
            return {k: v[0] for k, v in named.items()}, {k: v[1] for k, v in named.items()}
        if isinstance(node, Sequence) and shape.items is not None:
            items = [self.value(shape.items, each, f"{path}[{i}]") for i, each in enumerate(node.items)]
            return tuple(item[0] for item in items), [item[1] for item in items]
        if shape.leaves:
            return self.leaf(annotation, node, path)
        raise self._wrong(annotation, node, path)

    def leaf(self, annotation: Any, node: Node, path: str) -> tuple[Any, Any]:
        """A value without sections in it, checked by pydantic."""
        if not _finite(node):
            self.report(node, path, "MG105", "must be finite", allowed=describe(annotation))
            raise _Failed
        adapter = _adapter(annotation)
        error: ValidationError | None = None
        for candidate in _readings(node):
            try:
                value = adapter.validate_json(json.dumps(candidate), strict=True)
            except ValidationError as failure:
                error = error or failure
            else:
                return value, candidate
        raise self._wrong(annotation, node, path)

    def _wrong(self, annotation: Any, node: Node, path: str) -> _Failed:
        allowed = describe(annotation)
        words = [word for word in choices(annotation) if isinstance(word, str)]
        near = nearest_word(node.value, words) if isinstance(node, Scalar) and isinstance(node.value, str) else None
        message, fix = _what_is_wrong(annotation, node)
        self.report(node, path, "MG105", message, allowed=allowed, nearest=near, fix=f"write {near}" if near else fix)
        return _Failed()

    def _choose(self, annotation: Any, sections: tuple[type[Section], ...], node: Mapping, path: str) -> type[Section]:
        """Which of several sections a mapping is, by its `kind`."""
        if len(sections) == 1:
            return sections[0]
        by_kind = {kind_of(each): each for each in sections}
        words = ", ".join(str(kind) for kind in by_kind)
        chosen = node.entries.get("kind")
        if chosen is None:
            self.report(node, path, "MG104", "`kind` is missing", allowed=f"kind: one of {words}")
            raise _Failed
        section = by_kind.get(chosen.value) if isinstance(chosen, Scalar) and isinstance(chosen.value, str) else None
        if section is None:
            near = nearest_word(str(plain(chosen)), [kind for kind in by_kind if kind])
            fix = f"write {near}" if near else None
            here = _join(path, "kind")
            self.report(chosen, here, "MG105", "no such kind", allowed=f"one of: {words}", nearest=near, fix=fix)
            raise _Failed
        return section

    def _unknown_keys(self, known: dict[str, Any], node: Mapping, path: str) -> set[str]:
        """Report keys that do not exist; returns the missing keys that they were meant to be."""
        meant: set[str] = set()
        for key, value in node.entries.items():
            if key in known:
                continue
            near = nearest_key(key, known, path)
            if near in known:
                meant.add(near)
            place = f"in `{path}`" if path else "at the top level"
            question = f"; did you mean `{near}`?" if near else ""
            self.problems.append(
                problem_at(
                    node.keys.get(key, value.mark),
                    "MG103",
                    f"the key `{show(key)}` is unknown {place}{question}",
                    path=_join(path, show(key)),
                    nearest=near,
                    allowed=None if near else "the keys " + ", ".join(known),
                )
            )
        return meant

    def _missing(self, node: Mapping, path: str, info: FieldInfo) -> None:
        shape = shape_of(field_type(info))
        message = "this section is missing" if shape.sections else "this key is missing, and it has no default"
        self.problems.append(problem_at(node.mark, "MG104", message, path=path, allowed=describe(field_type(info))))

    def report(self, node: Node, path: str, code: str, message: str, **parts: Any) -> None:
        self.problems.append(problem_at(node.mark, code, message, path=path, value=show(plain(node)), **parts))


def _readings(node: Node) -> list[Any]:
    """The plain values that a node may stand for: itself; a number without fraction as a whole number (1e4); on the
    command line, where quotes are a nuisance, whatever was written as text."""
    value = plain(node)
    found = [value]
    if isinstance(node, Scalar):
        if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
            found.append(int(value))
        if node.mark.trusted and node.text and not isinstance(value, str):
            found.append(node.text)
    return found


def _finite(node: Node) -> bool:
    if isinstance(node, Scalar):
        return not isinstance(node.value, float) or math.isfinite(node.value)
    children = node.items if isinstance(node, Sequence) else tuple(node.entries.values())
    return all(_finite(child) for child in children)


def _what_is_wrong(annotation: Any, node: Node) -> tuple[str, str | None]:
    """One sentence on a value that did not parse, and what to do if the value hints at it."""
    wanted, kind = kinds(annotation), _kind(node)
    if kind == "nothing":
        return "there is no value", None
    if kind not in wanted and not ("number" in kind and "a number" in wanted):
        return f"must be {' or '.join(wanted)}, not {kind}", _fix(node, wanted)
    if choices(annotation):
        return "is not among what this may be", None
    return ("is out of range", None) if "number" in kind else ("does not match what this may be", None)


def _kind(node: Node) -> str:
    if isinstance(node, Mapping):
        return "a mapping"
    if isinstance(node, Sequence):
        return "a list"
    if node.value is None:
        return "nothing"
    if isinstance(node.value, bool):
        return "true or false"
    if isinstance(node.value, str):
        return "text"
    whole = isinstance(node.value, int) or node.value.is_integer()
    return "a whole number" if whole else "a number with decimals"


def _fix(node: Node, wanted: list[str]) -> str | None:
    if not isinstance(node, Scalar):
        return None
    if isinstance(node.value, str) and node.text is None and "number" in " ".join(wanted):
        return "remove the quotes"
    if isinstance(node.value, str) and node.value.lower() in {"on", "off", "yes", "no"} and "true or false" in wanted:
        return "write true or false: YAML 1.2 reads this as text"
    return "put quotes around it" if "text" in wanted else None


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
