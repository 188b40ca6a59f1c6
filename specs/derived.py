"""Defaults that follow from other values, filled in before the schema sees the tree: a spec then shows what it means.

- `layout.dp`: as many replicas as share the experts (`ep`).
- `layout.microbatches`: as many as fill the pipeline once.
"""

from __future__ import annotations

from moegraph.specs.nodes import Mapping, Mark, Scalar
from moegraph.specs.rules_layout import least_microbatches


def fill_derived(tree: Mapping) -> Mapping:
    """The tree with the values that it leaves out and that follow from those it has."""
    layout = tree.entries.get("layout")
    if not isinstance(layout, Mapping):
        return tree
    found: dict[str, Scalar] = {}
    ep, pp = _count(layout, "ep"), _count(layout, "pp")
    if "dp" not in layout.entries and ep > 1:
        found["dp"] = Scalar(ep, Mark("follows from layout.ep"))
    schedule = layout.entries.get("schedule")
    word = schedule.value if isinstance(schedule, Scalar) else "1f1b"
    if "microbatches" not in layout.entries and pp > 1:
        found["microbatches"] = Scalar(least_microbatches(pp, str(word)), Mark("follows from layout.pp"))
    if not found:
        return tree
    filled = Mapping({**layout.entries, **found}, layout.mark, layout.keys, layout.size + len(found))
    return Mapping({**tree.entries, "layout": filled}, tree.mark, tree.keys, tree.size + len(found))


def _count(layout: Mapping, key: str) -> int:
    node = layout.entries.get(key)
    value = node.value if isinstance(node, Scalar) else None
    return value if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 2**24 else 1
