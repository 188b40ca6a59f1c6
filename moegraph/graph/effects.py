"""Which nodes must never be removed or duplicated: those whose effect is felt outside their result.

Collectives have users on other ranks, so dead-code elimination that looks at this rank alone would make another rank
wait for ever (pytorch#130918). Mutating operators change an argument. Random operators may be removed, but not repeated
or merged: a second call draws other numbers (pytorch#190758).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch import fx

from moegraph._torch_compat import OpOverload
from moegraph.graph.names import display_name
from moegraph.ops.registry import ADDING, COMMUNICATION

COMMUNICATION_NAMESPACES = frozenset({"_c10d_functional", "_c10d_functional_autograd", "c10d", "symm_mem"})
_EXCHANGES = frozenset(
    {
        "moegraph::exact_exchange", "moegraph::direct_dispatch", "moegraph::direct_take", "moegraph::direct_return",
        "moegraph::direct_put",
    }
)  # fmt: skip
_IN_PLACE = frozenset(
    {
        operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod,
        operator.ipow, operator.iand, operator.ior, operator.ixor, operator.setitem, operator.delitem,
    }
)  # fmt: skip
_registered: set[str] = set()


def register_effectful(operator_name: str) -> None:
    """Marks an operator such as "namespace::name" as effectful."""
    _registered.add(operator_name)


def is_communication(node: fx.Node) -> bool:
    """Whether the node talks to other ranks."""
    return _namespace(node) in COMMUNICATION_NAMESPACES or node.target in COMMUNICATION or _name(node) in _EXCHANGES


def is_mutating(node: fx.Node) -> bool:
    """Whether the node's operator writes to one of its arguments: by its schema, and where it has none by torch's
    convention of a trailing underscore (what a Python function does inside, `propagate` sees)."""
    target = node.target
    if isinstance(target, OpOverload):
        return bool(target._schema.is_mutable)
    if node.op not in ("call_function", "call_method"):
        return False
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return target in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


def is_accumulation(node: fx.Node) -> bool:
    """Whether the node adds a weight gradient to a gradient buffer."""
    return node.target in ADDING


def is_random(node: fx.Node) -> bool:
    """Whether the node draws random numbers."""
    target = node.target
    return isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def is_effectful(node: fx.Node) -> bool:
    """Whether removing or repeating the node would be felt outside its result."""
    if node.op in ("placeholder", "output"):
        return True
    return is_communication(node) or is_mutating(node) or _name(node) in _registered


def eliminate_dead_code(graph: fx.Graph) -> list[fx.Node]:
    """Removes nodes without users unless they are effectful; returns what was removed, last first."""
    removed: list[fx.Node] = []
    for node in reversed(list(graph.nodes)):
        if not node.users and not is_effectful(node):
            graph.erase_node(node)
            removed.append(node)
    return removed


def lost_effects(before: Iterable[fx.GraphModule], after: Iterable[fx.GraphModule]) -> list[str]:
    """Names of effectful calls in the graphs `before` that none of the graphs `after` has."""
    kept = {display_name(node) for module in after for node in module.graph.nodes}
    found = [n for module in before for n in module.graph.nodes if n.op == "call_function" and is_effectful(n)]
    return list(dict.fromkeys(display_name(node) for node in found if display_name(node) not in kept))


def _name(node: fx.Node) -> str:
    target = node.target
    return str(target._schema.name) if isinstance(target, OpOverload) else ""


def _namespace(node: fx.Node) -> str:
    return _name(node).split("::")[0]
