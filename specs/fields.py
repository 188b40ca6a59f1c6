"""What the schema says about a field, in words and as data: the other files of this folder read the pydantic models
only through here.

A field is a *section* (a mapping with keys of its own), a choice of sections by their `kind`, a list or a named
collection of sections, or a *leaf* (a number, a string, a word from a list, a list of such).
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic.fields import FieldInfo

from moegraph.specs.schema.base import Section
from moegraph.specs.schema.spec import Spec


@dataclass(frozen=True)
class Shape:
    """The parts of a field's type. `leaves` are what a plain value or list may be; `items` and `values` are the
    section types of a list's items and of a collection's values."""

    nullable: bool
    sections: tuple[type[Section], ...]
    items: type[Section] | None
    values: type[Section] | None
    leaves: tuple[Any, ...]


@lru_cache(maxsize=1024)
def shape_of(annotation: Any) -> Shape:
    """The Shape of a type annotation."""
    nullable = False
    sections: list[type[Section]] = []
    items = values = None
    leaves = []
    for member in _members(annotation):
        bare = _strip(member)
        arguments = get_args(bare)
        if bare is type(None):
            nullable = True
        elif _is_section(bare):
            sections.append(bare)
        elif get_origin(bare) is tuple and _is_section(_strip(arguments[0])):
            items = _strip(arguments[0])
        elif get_origin(bare) is dict and _is_section(_strip(arguments[1])):
            values = _strip(arguments[1])
        else:
            leaves.append(member)
    return Shape(nullable, tuple(sections), items, values, tuple(leaves))


def field_type(info: FieldInfo) -> Any:
    """The annotation of a field together with its constraints."""
    return Annotated[(info.annotation, *info.metadata)] if info.metadata else info.annotation


def key_of(name: str, info: FieldInfo) -> str:
    """The key by which a field is written in a spec."""
    return info.alias or name


@lru_cache(maxsize=256)
def keys(section: type[Section]) -> dict[str, tuple[str, FieldInfo]]:
    """The keys of a section, each with its field's name and description."""
    return {key_of(name, info): (name, info) for name, info in section.model_fields.items()}


def kind_of(section: type[Section]) -> str | None:
    """The word that `kind` must be for this section, where sections are told apart by it."""
    info = section.model_fields.get("kind")
    words = get_args(info.annotation) if info is not None and get_origin(info.annotation) is Literal else ()
    return words[0] if len(words) == 1 else None


def describe(annotation: Any) -> str:
    """What values a type allows, in words: "a whole number from 1 to 4096", "one of: rms, layer"."""
    shape = shape_of(annotation)
    words: list[str] = []
    for leaf in shape.leaves:
        if get_origin(_strip(leaf)) is Literal:
            words += [str(value) for value in get_args(_strip(leaf))]
    others = [_describe_leaf(leaf) for leaf in shape.leaves if get_origin(_strip(leaf)) is not Literal]
    if shape.items is not None:
        others.append("a list of mappings with the keys " + ", ".join(keys(shape.items)))
    if shape.values is not None:
        others.append("a mapping of names to mappings with the keys " + ", ".join(keys(shape.values)))
    kinds = [kind for each in shape.sections if (kind := kind_of(each)) is not None]
    if shape.sections and len(kinds) == len(shape.sections):
        others.append("a mapping with kind: " + " or ".join(kinds))
    elif shape.sections:
        others.append("a mapping with the keys " + ", ".join(keys(shape.sections[0])))
    if shape.nullable:
        others.append("null")
    head = ["one of: " + ", ".join(words)] if len(words) > 1 else words
    return ", or ".join([*head, *others])


def kinds(annotation: Any) -> list[str]:
    """The kinds of value a type takes, in words: "a whole number", "a mapping"."""
    shape = shape_of(annotation)
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "text", dict: "a mapping"}
    found: list[str] = []
    for leaf in shape.leaves:
        bare = _strip(leaf)
        if get_origin(bare) is Literal:
            found += [words[type(value)] for value in get_args(bare)]
        else:
            found.append("a list" if get_origin(bare) is tuple else words.get(get_origin(bare) or bare, "any value"))
    found += ["a list"] if shape.items is not None else []
    found += ["a mapping"] if shape.sections or shape.values is not None else []
    return list(dict.fromkeys(found))


def choices(annotation: Any) -> tuple[Any, ...]:
    """Every word (or number) that a type lists."""
    found: list[Any] = []
    for leaf in shape_of(annotation).leaves:
        if get_origin(_strip(leaf)) is Literal:
            found += get_args(_strip(leaf))
    return tuple(found)


def walk(section: type[Section] = Spec, path: str = "") -> Iterator[tuple[str, type[Section], str, FieldInfo]]:
    """Every field of the schema as (spec path, section, key, field); `[]` stands for a list's index, `*` for a name."""
    for key, (_, info) in keys(section).items():
        here = f"{path}.{key}" if path else key
        yield here, section, key, info
        shape = shape_of(field_type(info))
        for inner in shape.sections:
            yield from walk(inner, here)
        if shape.items is not None:
            yield from walk(shape.items, here + "[]")
        if shape.values is not None:
            yield from walk(shape.values, here + ".*")


def _members(annotation: Any) -> Iterator[Any]:
    bare = _strip(annotation)
    if get_origin(bare) in (Union, types.UnionType):
        for member in get_args(bare):
            yield from _members(member)
    else:
        yield annotation


def _strip(annotation: Any) -> Any:
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    return annotation


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def _describe_leaf(leaf: Any) -> str:
    bare = _strip(leaf)
    if bare is bool:
        return "true or false"
    if bare in (int, float):
        return ("a whole number" if bare is int else "a number") + _bounds(leaf)
    if bare is str:
        pattern = _constraint(leaf, "pattern")
        low, high = _constraint(leaf, "min_length"), _constraint(leaf, "max_length")
        length = f" of {low or 0} to {high} characters" if high is not None else ""
        return f"letters that match {pattern}" if pattern else f"text{length}"
    if get_origin(bare) is tuple:
        arguments = get_args(bare)
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return f"a list, each {_describe_leaf(arguments[0])}"
        return f"a list of {len(arguments)}, each {_describe_leaf(arguments[0])}"
    return "a mapping" if get_origin(bare) is dict else "any value"


def _bounds(leaf: Any) -> str:
    low, above = _constraint(leaf, "ge"), _constraint(leaf, "gt")
    high, below = _constraint(leaf, "le"), _constraint(leaf, "lt")
    start = f" from {low:g}" if low is not None else f" above {above:g}" if above is not None else ""
    whole = isinstance(high, int)
    end = f" to {high if whole else format(high, 'g')}" if high is not None else ""
    if below is not None:
        end = f" and below {below:g}" if start else f" below {below:g}"
    return start + (end if not end.startswith(" to") or start.startswith(" from") else " up" + end)


def _constraint(annotation: Any, name: str) -> Any:
    """The value of a constraint wherever pydantic keeps it: in a FieldInfo, or as metadata of its own."""
    for part in get_args(annotation)[1:] if get_origin(annotation) is Annotated else ():
        for one in (part, *(part.metadata if isinstance(part, FieldInfo) else ())):
            value = getattr(one, name, None)
            if value is not None and (name == "pattern" or isinstance(one, annotated_types.BaseMetadata)):
                return value
    return None
