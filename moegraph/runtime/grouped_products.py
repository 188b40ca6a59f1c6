"""The grouped products that a compiled spec runs: read from the shapes of its step graphs, not from the spec.

One per product of the forward and of the backward graph of each kind of block; the fused experts are several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from moegraph import ops
from moegraph.graph.instances import instances_text
from moegraph.graph.names import display_name
from moegraph.graph.program import Program
from moegraph.kernels.chips import Card
from moegraph.kernels.config import payload_wgrad_config
from moegraph.kernels.shapes import Problem
from moegraph.kernels.tuning import Choice, choose_for
from moegraph.ops.mx_payload import payload_width
from moegraph.ops.payload_wgrad import payload_backend

_GRAPHS = ("forward", "backward")


@dataclass(frozen=True)
class Product:
    """A grouped product of a kind of block. `instances` are the blocks of the kind.

    Products of the fused experts: `plain` is what runs in the place of a kernel of theirs that a card does not get, and
    `leader` the product of the same operator that decides whether this one runs on moegraph's kernel. `payloads`: which
    operands of a weight gradient are rows in MXFP8.
    """

    kind: str
    instances: str
    graph: str
    node: str
    problem: Problem
    plain: Problem | None = None
    leader: Problem | None = None
    payloads: tuple[bool, bool] = (False, False)


class Resolved(NamedTuple):
    """What a product is on a card: the problem that is run, its backend and why, and the configuration where that is
    moegraph's kernel."""

    problem: Problem
    backend: str
    reason: str
    choice: Choice | None


def grouped_products(program: Program) -> list[Product]:
    """The products of a program after its last pass, in the order of its blocks and nodes."""
    found: list[Product] = []
    for kind, unit in program.units.items():
        instances = instances_text(program, kind)
        for graph in _GRAPHS:
            for node in unit.graphs[graph].graph.nodes:
                where = (kind, instances, graph, display_name(node))
                if node.target in _PROBLEMS:
                    found += (Product(*where, *problems) for problems in _PROBLEMS[node.target](*_values(node)))
                elif node.target in _OF_PAYLOADS:
                    found.append(Product(*where, *_payload_wgrad(*tuple(_values(node))[-3:])))
    return found


def resolve(product: Product, card: Card) -> Resolved:
    """What a product runs as on a card. Raises RunError if a tuning table for the card cannot be used."""
    problem = product.problem
    if any(product.payloads):
        p = problem
        backend, reason = payload_backend(p.n, p.k, p.rows, p.experts, product.payloads, card)
        if backend == "triton":
            config = payload_wgrad_config(p.n, p.k, not product.payloads[0], card.capability)
            return Resolved(p, backend, f"dequantises as it loads: {reason}", Choice(config, "rule", "not measured"))
    backend, reason = _backend(product.leader or problem, card)
    if product.leader is not None and backend == "triton":
        reason = f"bias and row weight in its epilogue, so it runs where {product.leader.kernel} does"
    elif backend != "triton":
        problem = product.plain or problem
        backend, reason = _backend(problem, card)
    return Resolved(problem, backend, reason, choose_for(problem, card) if backend == "triton" else None)


def _backend(p: Problem, card: Card) -> tuple[str, str]:
    return ops.grouped_mm_backend(p.kernel, p.dtype, p.n, p.k, p.rows, p.experts, card)


def _values(node: fx.Node) -> Iterator[Any]:
    return (arg.meta.get("val") if isinstance(arg, fx.Node) else arg for arg in node.args)


# Problems of an operator, each with what it is without the fused kernel and with the one that decides for it.
_Problems = list[tuple[Problem, Problem | None, Problem | None]]


def _forward(rows: Tensor, weight: Tensor, offsets: Tensor) -> _Problems:
    experts, n, k = weight.shape
    return [(Problem("grouped_mm", rows.dtype, n, k, rows.shape[0], experts), None, None)]


def _dgrad(grad: Tensor, weight: Tensor, offsets: Tensor) -> _Problems:
    experts, k, n = weight.shape
    return [(Problem("grouped_mm_dgrad", grad.dtype, n, k, grad.shape[0], experts), None, None)]


def _wgrad(grad: Tensor, rows: Tensor, offsets: Tensor) -> _Problems:
    (num_rows, n), k = grad.shape, rows.shape[1]
    return [(Problem("wgrad", grad.dtype, n, k, num_rows, offsets.shape[0]), None, None)]


def _wgrad_add(into: Tensor, keep: Tensor, grad: Tensor, rows: Tensor, offsets: Tensor) -> _Problems:
    return _wgrad(grad, rows, offsets)


def _payload_wgrad(grad: Tensor, rows: Tensor, offsets: Tensor) -> tuple[Problem, None, None, tuple[bool, bool]]:
    payloads = grad.dtype == torch.uint8, rows.dtype == torch.uint8
    n, k = (payload_width(each) if low else each.shape[1] for each, low in zip((grad, rows), payloads, strict=True))
    return Problem("wgrad", torch.bfloat16, n, k, grad.shape[0], offsets.shape[0]), None, None, payloads


def _fused(x: Tensor, order: Tensor, inverse: Tensor, offsets: Tensor, row_weight: Tensor, *weights: Any) -> _Problems:
    rows, (experts, d, f) = order.shape[0], weights[1].shape
    up = Problem("up_swiglu", x.dtype, f, d, rows, experts, x.shape[0])
    plain = Problem("grouped_mm", x.dtype, 2 * f, d, rows, experts)
    return [(up, plain, None), (Problem("grouped_mm", x.dtype, d, f, rows, experts), None, up)]


def _fused_dgrad(
    grad: Tensor, z: Tensor, row_weight: Tensor, w_down: Tensor, offsets: Tensor, alpha: float, limit: float
) -> _Problems:
    rows, (experts, d, f) = grad.shape[0], w_down.shape
    plain = Problem("grouped_mm_dgrad", grad.dtype, f, d, rows, experts)
    if limit:  # the clamped activation's gradient is a kernel of its own behind the plain product
        return [(plain, None, None)]
    return [(Problem("dgrad_swiglu", grad.dtype, f, d, rows, experts), plain, None)]


_mg = torch.ops.moegraph
_OF_PAYLOADS = {_mg.payload_grouped_mm_wgrad.default, _mg.payload_grouped_mm_wgrad_add.default}
_PROBLEMS: dict[Any, Callable[..., _Problems]] = {
    _mg.grouped_mm.default: _forward,
    _mg.grouped_mm_dgrad.default: _dgrad,
    _mg.grouped_mm_wgrad.default: _wgrad,
    _mg.grouped_mm_wgrad_add.default: _wgrad_add,
    _mg.expert_ffn.default: _fused,
    _mg.expert_ffn_dgrad.default: _fused_dgrad,
}
