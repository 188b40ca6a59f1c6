"""Propagation of values: every node is evaluated again on fake tensors and must give what is recorded for it.

A pass that changes an operand without noticing that a shape or dtype changed downstream is caught here, at the node; so
is a Python function that writes to its argument, which no schema would tell.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, fx

from moegraph._torch_compat import FakeTensorMode
from moegraph.errors import CheckFailed
from moegraph.graph.effects import is_mutating
from moegraph.graph.names import display_name, target_name
from moegraph.graph.text import value_text


class Propagator:
    """Evaluates graphs on fake tensors. What an operator gives depends on its arguments' dtypes, shapes and strides
    only, so it is asked once for each combination: blocks, and forward and evaluate, repeat each other."""

    def __init__(self) -> None:
        self.fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._known: dict[Hashable, Any] = {}

    def check(self, module: fx.GraphModule, made_by: str) -> None:
        """Checks each node's recorded value; raises `CheckFailed` naming the pass and the node that differs."""
        values: dict[fx.Node, Any] = {}
        with self.fake_mode, torch.no_grad():
            for node in module.graph.nodes:
                recorded = node.meta.get("val")
                if recorded is None or node.op not in ("placeholder", "get_attr", "call_function", "output"):
                    raise CheckFailed(f"after {made_by}: node {display_name(node)} ({node.op}) has no recorded value")
                if node.op in ("placeholder", "get_attr") and isinstance(recorded, Tensor):
                    values[node] = self._empty(recorded)
                elif node.op == "output":
                    values[node] = tuple(values[n] if isinstance(n, fx.Node) else n for n in node.args[0])
                else:
                    values[node] = self._evaluate(node, values, made_by)
                if value_text(values[node]) != value_text(recorded):
                    raise CheckFailed(
                        f"after {made_by}: node {display_name(node)} gives {value_text(values[node])}, "
                        f"but {value_text(recorded)} is recorded"
                    )

    def _empty(self, recorded: Tensor) -> Tensor:
        shape, stride = tuple(recorded.shape), recorded.stride()
        key = ("empty", shape, stride, recorded.dtype)
        if key not in self._known:
            self._known[key] = torch.empty_strided(shape, stride, dtype=recorded.dtype, device=recorded.device)
        found: Tensor = self._known[key]
        return found

    def _evaluate(self, node: fx.Node, values: dict[fx.Node, Any], made_by: str) -> Any:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: values[n])
        key = (node.target, _key(args), _key(kwargs))
        if key in self._known:
            return self._known[key]
        tensors = [values[n] for n in node.all_input_nodes if isinstance(values[n], Tensor)]
        versions = [tensor._version for tensor in tensors]
        try:
            found = node.target(*args, **kwargs)  # type: ignore[operator]
        except Exception as error:
            raise CheckFailed(
                f"after {made_by}: node {display_name(node)} = {target_name(node)}(…) cannot be evaluated: {error}"
            ) from error
        if versions != [tensor._version for tensor in tensors] and not is_mutating(node):
            raise CheckFailed(
                f"after {made_by}: node {display_name(node)} = {target_name(node)} writes to its argument"
            )
        self._known[key] = found
        return found


def _key(argument: Any) -> Hashable:
    if isinstance(argument, Tensor):
        return (Tensor, tuple(argument.shape), argument.stride(), argument.storage_offset(), argument.dtype)
    if isinstance(argument, dict):
        return tuple((name, _key(value)) for name, value in argument.items())
    if isinstance(argument, (tuple, list)):
        return (type(argument).__name__, *map(_key, argument))
    return (type(argument).__name__, repr(argument))


def propagate(module: fx.GraphModule, made_by: str) -> None:
    """Checks one graph; see `Propagator.check`."""
    Propagator().check(module, made_by)
