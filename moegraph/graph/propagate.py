"""Propagation of values: every node is evaluated again on fake tensors and must give what is recorded for it.

A pass that changes an operand without noticing that a shape or dtype changed downstream is caught here, at the node.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from moegraph.errors import CheckFailed
from moegraph.graph.names import display_name, target_name
from moegraph.graph.text import value_text


def propagate(module: fx.GraphModule, made_by: str) -> None:
    """Checks each node's recorded value; raises `CheckFailed` naming the pass and the node that differs."""
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    values: dict[fx.Node, Any] = {}
    with fake_mode, torch.no_grad():
        for node in module.graph.nodes:
            if node.op == "output":
                continue
            recorded = node.meta.get("val")
            if node.op in ("placeholder", "get_attr") and isinstance(recorded, Tensor):
                values[node] = torch.empty_strided(
                    tuple(recorded.shape), recorded.stride(), dtype=recorded.dtype, device=recorded.device
                )
                continue
            if node.op != "call_function" or recorded is None:
                raise CheckFailed(f"after {made_by}: node {display_name(node)} ({node.op}) has no recorded value")
            values[node] = _evaluate(node, values, made_by)
            if value_text(values[node]) != value_text(recorded):
                raise CheckFailed(
                    f"after {made_by}: node {display_name(node)} gives {value_text(values[node])}, "
                    f"but {value_text(recorded)} is recorded"
                )


def _evaluate(node: fx.Node, values: dict[fx.Node, Any], made_by: str) -> Any:
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: values[n])
    try:
        return node.target(*args, **kwargs)  # type: ignore[operator]
    except Exception as error:
        raise CheckFailed(
            f"after {made_by}: node {display_name(node)} = {target_name(node)}(…) cannot be evaluated: {error}"
        ) from error
