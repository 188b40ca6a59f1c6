"""What the casts to 8 bits share: operands quantised by nodes of their own, products of experts on what these made.

    grouped_mm(x, w, offsets)        =>  qx, sx = quantize(x);  qw, sw = quantize(w)
                                         scaled_mm(qx, sx, qw, sw, offsets)
    grouped_mm_dgrad(g, w, offsets)  =>  the same with g and wᵀ, quantised along its other side
    expert_ffn(x, order, …)          =>  rows = permute(x, order, …);  z, a = up_swiglu(quantize(rows), quantize(w_up))
                                         y = scaled_mm(quantize(a), quantize(w_down), …)
    expert_ffn_dgrad(g, z, …)        =>  dgrad_swiglu(quantize(g), quantize(w_downᵀ), z, …)

A quantise node is made once for each value, orientation and direction. One that backward needs is made in backward, so
that no quantised weight is kept. Scales are along the contraction, so an input gradient needs its weight quantised
again: the two are not transposes of each other.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from moegraph.graph.edit import Rewriter
from moegraph.graph.names import display_name, facts

_mg = torch.ops.moegraph
_take: Any = operator.getitem


@dataclass(frozen=True)
class Recipe:
    """The operators of one format. `rest` is the argument behind those that all formats have, `layout` what stands
    behind (x, offsets) when something is quantised."""

    name: str
    quantize: Any
    product: Any
    up: Any
    dgrad: Any
    layout: tuple[bool, ...]
    rest: tuple[bool, ...]
    columns: Any = None  # quantises along rows, expert by expert, for
    wgrad: Any = None  # weight gradients; None leaves them in bf16


@dataclass(frozen=True)
class Product:
    """A product of experts as a pass finds it: contraction k and output width n of each expert, over so many rows.
    Fused experts are both projections: n = 3F, as if of one product. `side` is the shortest of a weight. `part` of the
    model: experts, shared or attention; a linear layer has one expert, and an `operand` that others may read too."""

    node: fx.Node
    kind: str  # forward, input gradient, weight gradient
    n: int
    k: int
    rows: int
    experts: int
    side: int
    part: str = "experts"
    operand: fx.Node | None = None


@dataclass
class Caster:
    """Rewrites the products of one joint graph."""

    rewriter: Rewriter
    recipe: Recipe
    made: dict[Any, tuple[fx.Node, ...]] = field(default_factory=dict)

    def cast(self, node: fx.Node) -> None:
        """Replaces one product by that of quantised operands."""
        _CASTS[node.target](self, node)

    def call(self, at: fx.Node, what: str, target: Any, *args: Any) -> fx.Node:
        """A call before `at`, credited to the same layer node."""
        return call_like(self.rewriter, at, what, target, *args)

    def parts(self, at: fx.Node, call: fx.Node, count: int) -> tuple[fx.Node, ...]:
        """The results of a call, taken apart."""
        return tuple(self.call(at, "getitem", _take, call, index) for index in range(count))

    def quantized(self, at: fx.Node, x: fx.Node, offsets: fx.Node | None = None) -> tuple[fx.Node, ...]:
        """(data, scale) of x along its last axis."""
        key = (x, offsets, facts(at)["direction"])
        if key not in self.made:
            call = self.call(at, "quantize", self.recipe.quantize, x, offsets, *self.recipe.layout)
            self.made[key] = self.parts(at, call, 2)
        return self.made[key]

    def quantized_columns(self, at: fx.Node, x: fx.Node, offsets: fx.Node) -> tuple[fx.Node, ...]:
        """(data, scale, offsets of the padded runs) of x along its rows, expert by expert."""
        key = (x, offsets, "columns")
        if key not in self.made:
            call = self.call(at, "quantize", self.recipe.columns, x, offsets, *self.recipe.layout)
            self.made[key] = self.parts(at, call, 3)
        return self.made[key]

    def transposed(self, at: fx.Node, w: fx.Node) -> tuple[fx.Node, ...]:
        """(data, scale) of the weights [E, N, K] as [E, K, N], along N."""
        key = (w, "transposed")
        if key not in self.made:
            turned = self.call(at, "transpose", torch.ops.aten.transpose.int, w, 1, 2)
            self.made[key] = self.quantized(at, turned)
        return self.made[key]

    def replace(self, node: fx.Node, by: fx.Node) -> None:
        """`by` in the place of `node`."""
        self.rewriter.replace(node, by)


def call_like(rewriter: Rewriter, at: fx.Node, what: str, target: Any, *args: Any) -> fx.Node:
    """A call before `at`, credited to the same layer node and direction, named `what`."""
    new = rewriter.call_before(at, f"{prefix_of(at)}{what}", target, *args)
    facts(new).update(layer=facts(at)["layer"], direction=facts(at)["direction"])
    return new


def products_of(graph: fx.Graph) -> list[Product]:
    """The products of experts in a joint graph, in order."""
    return [_described(node) for node in graph.nodes if node.op == "call_function" and node.target in _CASTS]


def _described(node: fx.Node) -> Product:
    args: Any = [a.meta["val"] if isinstance(a, fx.Node) else a for a in node.args]
    if node.target is _mg.grouped_mm_wgrad.default:
        grad, rows, offsets = args
        n, k = grad.shape[1], rows.shape[1]
        return Product(node, "weight gradient", n, k, rows.shape[0], offsets.shape[0], min(n, k))
    if node.target is _mg.expert_ffn.default:
        experts, _, d = args[5].shape
        f = args[6].shape[2]
        return Product(node, "forward", 3 * f, d, args[1].shape[0], experts, min(f, d))
    weight = args[3] if node.target is _mg.expert_ffn_dgrad.default else args[1]
    experts, n, k = weight.shape
    if node.target is _mg.grouped_mm.default:
        return Product(node, "forward", n, k, args[0].shape[0], experts, min(n, k))
    return Product(node, "input gradient", k, n, args[0].shape[0], experts, min(n, k))


def prefix_of(node: fx.Node) -> str:
    """How the names of nodes begin that are made next to this one: `moe.experts/`, or `moe.experts/grad.`."""
    head, _, tail = display_name(node).partition("/")
    return f"{head}/grad." if tail.startswith("grad.") else f"{head}/"


def _forward(c: Caster, node: fx.Node) -> None:
    rows, w, offsets = node.args
    operands = (*c.quantized(node, rows, offsets), *c.quantized(node, w))  # type: ignore[arg-type]
    c.replace(node, c.call(node, "scaled_mm", c.recipe.product, *operands, offsets, None, None, *c.recipe.rest))


def _dgrad(c: Caster, node: fx.Node) -> None:
    grad, w, offsets = node.args
    operands = (*c.quantized(node, grad, offsets), *c.transposed(node, w))  # type: ignore[arg-type]
    c.replace(node, c.call(node, "scaled_mm", c.recipe.product, *operands, offsets, None, None, *c.recipe.rest))


def _wgrad(c: Caster, node: fx.Node) -> None:
    grad, rows, offsets = node.args
    *left, padded = c.quantized_columns(node, grad, offsets)  # type: ignore[arg-type]
    *right, _ = c.quantized_columns(node, rows, offsets)  # type: ignore[arg-type]
    c.replace(node, c.call(node, "scaled_wgrad", c.recipe.wgrad, *left, *right, padded, *c.recipe.rest))


def _experts(c: Caster, node: fx.Node) -> None:
    args: Any = node.args
    x, order, inverse, offsets, row_weight, w_up, w_down, b_up, b_down, top_k, alpha, limit, _ = args
    rows = c.call(node, "rows", _mg.permute.default, x, order, inverse, offsets, top_k)
    operands = (*c.quantized(node, rows, offsets), *c.quantized(node, w_up))
    up = c.call(node, "up", c.recipe.up, *operands, offsets, b_up, alpha, limit, *c.recipe.rest)
    z, act = c.parts(node, up, 2)
    operands = (*c.quantized(node, act, offsets), *c.quantized(node, w_down))
    y = c.call(node, "scaled_mm", c.recipe.product, *operands, offsets, b_down, row_weight, *c.recipe.rest)
    for user in list(node.users):
        c.replace(user, (y, z)[user.args[1]])  # type: ignore[index]
    c.rewriter.graph.erase_node(node)


def _experts_dgrad(c: Caster, node: fx.Node) -> None:
    grad, z, row_weight, w_down, offsets, alpha, limit = node.args
    operands = (*c.quantized(node, grad, offsets), *c.transposed(node, w_down))  # type: ignore[arg-type]
    rest = (z, row_weight, offsets, alpha, limit, *c.recipe.rest)
    c.replace(node, c.call(node, "dgrad", c.recipe.dgrad, *operands, *rest))


_CASTS: dict[Any, Callable[[Caster, fx.Node], None]] = {
    _mg.grouped_mm.default: _forward,
    _mg.grouped_mm_dgrad.default: _dgrad,
    _mg.grouped_mm_wgrad.default: _wgrad,
    _mg.expert_ffn.default: _experts,
    _mg.expert_ffn_dgrad.default: _experts_dgrad,
}
