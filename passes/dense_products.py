"""Linear layers in a joint graph that can be cast to 8 bits: projections of attention, and shared experts.

    mm(x, t(w))   or addmm(b, x, t(w))   =>  qx, sx = quantize(x);  qw, sw = quantize(w);   mx_linear(qx, sx, qw, sw, b)
    mm(g, w)      input gradient         =>  the same with g and wᵀ, quantised along its other side
    mm(t(g), x)   weight gradient        =>  mx_linear_wgrad(qg, sg, qx, sx) of both quantised along tokens

They are found by the layer node that they come from and by the parameter that they read, so that router, head and the
gate of shared experts are never among them. Quantise nodes, and what becomes of them, are those of `low_precision`: q,
k and v read one quantised x.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from moegraph.graph.names import facts
from moegraph.graph.program import ports
from moegraph.passes.low_precision import Caster, Product

_mg = torch.ops.moegraph
_aten = torch.ops.aten
PARTS = {
    **dict.fromkeys(("attention.q", "attention.k", "attention.v", "attention.output"), "attention"),
    **dict.fromkeys(("shared.up", "shared.down"), "shared"),
}


def dense_products(joint: fx.GraphModule) -> list[Product]:
    """The products of those linear layers, forward and backward, in order."""
    given = zip(joint.graph.find_nodes(op="placeholder"), ports(joint, "inputs"), strict=True)
    weights = {node for node, port in given if port.role == "parameter"}
    products = [node for node in joint.graph.nodes if node.target in (_aten.mm.default, _aten.addmm.default)]
    return [_described(node, weights) for node in products if facts(node).get("layer") in PARTS]


def _described(node: fx.Node, weights: set[fx.Node]) -> Product:
    left, right = _operands(node)
    part = PARTS[facts(node)["layer"]]
    (rows, k), n = left.meta["val"].shape, right.meta["val"].shape[1]
    weight, turned = _without_transposes(right)
    if weight not in weights:  # the contraction is over tokens, and it is the left operand that is transposed
        return Product(node, "weight gradient", rows, n, k, 1, min(rows, n), part)
    kind = "forward" if turned else "input gradient"
    return Product(node, kind, n, k, rows, 1, min(n, k), part, left)


def _operands(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    left, right = node.args[-2:]
    assert isinstance(left, fx.Node)
    assert isinstance(right, fx.Node)
    return left, right


def _without_transposes(node: fx.Node) -> tuple[fx.Node, bool]:
    """What a node transposes, and whether it comes out transposed."""
    turned = False
    while node.target is _aten.t.default:
        source: Any = node.args[0]
        node, turned = source, not turned
    return node, turned


def cast_dense(c: Caster, product: Product) -> None:
    """Replaces a product by that of quantised operands."""
    node = product.node
    x, right = _operands(node)
    if product.kind == "weight gradient":
        grad, _ = _without_transposes(x)
        operands = (*_along_tokens(c, node, grad), *_along_tokens(c, node, right))
        c.replace(node, c.call(node, "mx_linear_wgrad", _mg.mx_linear_wgrad.default, *operands, *c.recipe.rest))
        return
    weight, _ = _without_transposes(right)
    bias = node.args[0] if node.target is _aten.addmm.default else None
    by = c.quantized(node, weight) if product.kind == "forward" else _turned(c, node, weight)
    c.replace(node, c.call(node, "mx_linear", _mg.mx_linear.default, *c.quantized(node, x), *by, bias, *c.recipe.rest))


def _turned(c: Caster, at: fx.Node, weight: fx.Node) -> tuple[fx.Node, ...]:
    """(data, scale) of a weight [N, K] as [K, N], along N."""
    key = (weight, "transposed")
    if key not in c.made:
        c.made[key] = c.quantized(at, c.call(at, "t", _aten.t.default, weight))
    return c.made[key]


def _along_tokens(c: Caster, at: fx.Node, x: fx.Node) -> tuple[fx.Node, ...]:
    """(data, scale) of x [T, K] along its tokens."""
    key = (x, "tokens")
    if key not in c.made:
        call = c.call(at, "quantize", _mg.mx_quantize_tokens.default, x, *c.recipe.layout)
        c.made[key] = c.parts(at, call, 2)
    return c.made[key]
