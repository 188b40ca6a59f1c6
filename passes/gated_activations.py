"""The gated activation and its gradient, found in a joint graph by what tracing makes of them.

    a  = convert(mul(silu(gate), up))  of  split(convert(z))              is  swiglu(z)
    dz = convert(cat(da · up · σ · (1 + gate · (1 - σ)), da · gate · σ))  is  swiglu_backward(da, z)

and the same of `swiglu_clamped`, with its two numbers. The patterns are traced from the operators themselves
(`moegraph.ops.pointwise`), so that they are those of any torch, and a node matches only if everything behind it does,
down to z and da.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from moegraph._torch_compat import FakeTensorMode
from moegraph.ops import pointwise

_IDENTITIES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
_ALPHA, _LIMIT = 0.3125, 11.0  # numbers that no pattern has of its own: they stand for any


@dataclass(frozen=True)
class GatedActivation:
    """An activation of z, or where there is a `grad` of it, the gradient of z. `limit` 0 is plain SwiGLU."""

    z: fx.Node
    alpha: float
    limit: float
    grad: fx.Node | None = None


def activation_of(node: fx.Node) -> GatedActivation | None:
    """What `node` [R, F] is the activation of, or None."""
    if (value := _matrix(node)) is None:
        return None
    z = (value.shape[0], 2 * value.shape[1])
    return _found(node, _forward, (z,), value.dtype)


def gradient_of(node: fx.Node) -> GatedActivation | None:
    """Of what activation `node` [R, 2F] is the gradient, or None."""
    if (value := _matrix(node)) is None or value.shape[1] % 2:
        return None
    grad = (value.shape[0], value.shape[1] // 2)
    return _found(node, _backward, (tuple(value.shape), grad), value.dtype)


def _matrix(node: fx.Node) -> Tensor | None:
    value = node.meta.get("val")
    found = isinstance(value, Tensor) and value.dim() == 2 and node.op == "call_function"
    return value if found else None


def _forward(clamped: bool, z: Tensor) -> Tensor:
    return pointwise.swiglu_clamped(z, alpha=_ALPHA, limit=_LIMIT) if clamped else pointwise.swiglu(z)


def _backward(clamped: bool, z: Tensor, grad: Tensor) -> Tensor:
    if clamped:
        return pointwise.swiglu_clamped_backward(grad, z, _ALPHA, _LIMIT)
    return pointwise.swiglu_backward(grad, z)


def _found(
    node: fx.Node, function: Callable[..., Tensor], shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype
) -> GatedActivation | None:
    for clamped in (False, True):
        inputs, root = _pattern(function, clamped, shapes, dtype)
        match = _Match()
        if match.same(node, root):
            z, *grad = (match.nodes[each] for each in inputs)
            alpha, limit = (match.numbers[each] if clamped else 0.0 for each in (_ALPHA, _LIMIT))
            return GatedActivation(z, alpha, limit, grad[0] if grad else None)
    return None


@cache
def _pattern(
    function: Callable[..., Tensor], clamped: bool, shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype
) -> tuple[list[fx.Node], fx.Node]:
    """The inputs and the result of a function as make_fx traces it, for inputs of these shapes."""
    with FakeTensorMode():
        given = [torch.empty(shape, dtype=dtype) for shape in shapes]
        graph = make_fx(lambda *args: function(clamped, *args))(*given).graph
    for node in graph.nodes:
        if node.target in _IDENTITIES:
            node.replace_all_uses_with(node.args[0])
    (result,) = graph.find_nodes(op="output")
    return list(graph.find_nodes(op="placeholder")), result.args[0]


class _Match:
    """What the placeholders of a pattern stand for in a graph, and its numbers."""

    def __init__(self) -> None:
        self.nodes: dict[fx.Node, fx.Node] = {}
        self.numbers: dict[float, float] = {}

    def same(self, have: Any, want: Any) -> bool:
        """Whether an argument, or a node and all behind it, is what the pattern has there."""
        if isinstance(want, fx.Node):
            return isinstance(have, fx.Node) and self._node(have, want)
        if isinstance(want, (tuple, list)):
            same = isinstance(have, (tuple, list)) and len(have) == len(want)
            return same and all(self.same(a, b) for a, b in zip(have, want, strict=True))
        if isinstance(want, float) and abs(want) in (_ALPHA, _LIMIT):
            if not isinstance(have, (int, float)):
                return False
            number = have if want > 0 else -have
            return bool(self.numbers.setdefault(abs(want), number) == number)
        return bool(have == want)

    def _node(self, have: fx.Node, want: fx.Node) -> bool:
        if want in self.nodes or want.op == "placeholder":
            return self.nodes.setdefault(want, have) is have
        if have.target is not want.target or have.kwargs.keys() != want.kwargs.keys():
            return False
        self.nodes[want] = have
        named = ((have.kwargs[name], want.kwargs[name]) for name in want.kwargs)
        return self.same(have.args, want.args) and all(self.same(a, b) for a, b in named)
