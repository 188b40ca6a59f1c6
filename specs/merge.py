"""Laying one tree over another: mapping by mapping; lists and single values are replaced whole.

Where both have a `kind` and the kinds differ, the upper mapping replaces the lower one, since the keys of one kind mean
nothing to another.
"""

from __future__ import annotations

from moegraph.specs.nodes import Mapping, Node, Scalar


def overlay(lower: Node, upper: Node) -> Node:
    """`upper` laid over `lower`; every value keeps the mark of the tree it came from."""
    if not isinstance(lower, Mapping) or not isinstance(upper, Mapping) or _changes_kind(lower, upper):
        return upper
    entries = dict(lower.entries)
    keys = dict(lower.keys)
    for key, value in upper.entries.items():
        entries[key] = overlay(entries[key], value) if key in entries else value
        keys[key] = upper.keys[key]
    size = 1 + sum(node.size for node in entries.values())
    # What is missing from a mapping is reported where a file has it, not at the override that touched it.
    return Mapping(entries, upper.mark if upper.mark.line else lower.mark, keys, size)


def _changes_kind(lower: Mapping, upper: Mapping) -> bool:
    before, after = lower.entries.get("kind"), upper.entries.get("kind")
    return isinstance(before, Scalar) and isinstance(after, Scalar) and before.value != after.value
