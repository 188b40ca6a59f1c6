"""Names and facts of nodes. Facts live in `node.meta["custom"]`, JSON-able, so that they survive torch.compile.

`name` is what people read (`moe.route`, or `moe.route/grad.mul` in a step graph); `made_by` the pass that made the
node; step-graph nodes add `layer` (the layer-graph node they come from) and `direction`.
"""

from __future__ import annotations

import re
from typing import Any

from torch import fx


def facts(node: fx.Node) -> dict[str, Any]:
    """The node's own facts, created if absent."""
    custom: dict[str, Any] = node.meta.setdefault("custom", {})
    return custom


def display_name(node: fx.Node) -> str:
    """The dotted name people read."""
    return str(facts(node).get("name", node.name))


def identifier(name: str) -> str:
    """A Python identifier for a dotted name, as fx wants it."""
    text = re.sub(r"\W+", "_", name).strip("_")
    return text if not text[:1].isdigit() else f"_{text}"


def unique_name(name: str, taken: set[str]) -> str:
    """`name`, or `name.2`, `name.3` … when it is taken; the result is added to `taken`."""
    candidate, count = name, 1
    while candidate in taken:
        count += 1
        candidate = f"{name}.{count}"
    taken.add(candidate)
    return candidate


def target_name(node: fx.Node) -> str:
    """How the operator of a node is printed: `linear`, `aten.mm`, `moegraph.grouped_mm`."""
    target = node.target
    if isinstance(target, str):
        return target
    text = str(target)
    if hasattr(target, "overloadpacket"):
        return text.removesuffix(".default")
    name: str = getattr(target, "__name__", text)
    return name
