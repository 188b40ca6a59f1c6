"""The final values of a spec, each with its origin: what `inspect --resolved` prints and `compile` writes.

A value is a leaf of the spec as it would be written: a list is one value unless it is a list of mappings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from moegraph.specs.nodes import Mapping, Node, Sequence, show
from moegraph.specs.scalars import resolve
from moegraph.specs.schema.spec import Spec

_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./-]*")

if TYPE_CHECKING:
    from moegraph.specs.loader import ResolvedSpec


def spec_data(spec: Spec) -> dict[str, Any]:
    """The whole spec as JSON-able values, defaults included, keys as they are written in a file."""
    data: dict[str, Any] = spec.model_dump(mode="json", by_alias=True)
    return data


def origins_of(spec: Spec, tree: Node) -> dict[str, str]:
    """The origin of every final value, by its spec path."""
    return {path: _origin(tree, keys) for path, keys, _ in _leaves(spec_data(spec))}


def resolved_data(resolved: ResolvedSpec) -> dict[str, dict[str, Any]]:
    """Every final value and its origin, by spec path, as JSON-able values."""
    leaves = _leaves(spec_data(resolved.spec))
    return {path: {"value": value, "origin": resolved.origins[path]} for path, _, value in leaves}


def resolved_lines(resolved: ResolvedSpec) -> list[str]:
    """One line per final value: `model.moe.top_k: 2    # presets/tiny.yaml:13:12`."""
    rows = [(f"{path}: {show(each['value'], 200)}", each["origin"]) for path, each in resolved_data(resolved).items()]
    width = min(max(len(left) for left, _ in rows), 60)
    return [f"{left:<{width}}  # {origin}" for left, origin in rows]


def resolved_yaml(spec: Spec) -> str:
    """The whole spec as YAML text, every default written out; loading it gives an equal Spec."""
    return "\n".join(_yaml(spec_data(spec), 0)) + "\n"


def _leaves(
    value: Any, path: str = "", keys: tuple[str | int, ...] = ()
) -> Iterator[tuple[str, tuple[str | int, ...], Any]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else key, (*keys, key))
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]", (*keys, index))
    else:
        yield path, keys, value


def _origin(tree: Node, keys: tuple[str | int, ...]) -> str:
    node = tree
    for key in keys:
        if isinstance(node, Mapping) and key in node.entries:
            node = node.entries[str(key)]
        elif isinstance(node, Sequence) and isinstance(key, int):
            node = node.items[key]
        else:
            return "default"
    return str(node.mark)


def _yaml(value: Any, indent: int) -> Iterator[str]:
    """Block style for mappings; whatever has no mapping around it in flow style."""
    space = "  " * indent
    for key, item in value.items():
        if isinstance(item, dict) and item:
            yield f"{space}{_flow(key)}:"
            yield from _yaml(item, indent + 1)
        else:
            yield f"{space}{_flow(key)}: {_flow(item)}"


def _flow(value: Any) -> str:
    """A value in flow style: plain words bare, all else as JSON, which YAML 1.2 contains."""
    if isinstance(value, str):
        bare = _PLAIN.fullmatch(value) and isinstance(resolve(value), str)
        return value if bare else json.dumps(value, ensure_ascii=not value.isprintable())
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_flow(key)}: {_flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_flow, value)) + "]"
    return json.dumps(value)
