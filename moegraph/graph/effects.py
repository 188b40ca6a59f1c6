"""Which nodes must never be removed or duplicated: those whose effect is felt outside their result.

Collectives have users on other ranks, so dead-code elimination that looks at this rank alone would make another rank
wait for ever (pytorch#130918). Mutating operators change an argument.
"""

from __future__ import annotations

import torch
from torch import fx

COMMUNICATION_NAMESPACES = frozenset({"_c10d_functional", "_c10d_functional_autograd", "c10d", "symm_mem"})
_registered: set[str] = set()


def register_effectful(operator_name: str) -> None:
    """Marks an operator such as "namespace::name" as effectful."""
    _registered.add(operator_name)


def is_communication(node: fx.Node) -> bool:
    """Whether the node talks to other ranks."""
    return _namespace(node) in COMMUNICATION_NAMESPACES


def is_mutating(node: fx.Node) -> bool:
    """Whether the node's operator writes to one of its arguments."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and bool(target._schema.is_mutable)


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


def _name(node: fx.Node) -> str:
    target = node.target
    return str(target._schema.name) if isinstance(target, torch._ops.OpOverload) else ""


def _namespace(node: fx.Node) -> str:
    return _name(node).split("::")[0]
