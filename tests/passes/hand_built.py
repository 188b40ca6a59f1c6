"""Layer graphs written by hand for tests of passes."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import fx

from moegraph.graph.build import GraphBuilder
from moegraph.graph.names import display_name
from moegraph.graph.program import Parameter, Unit
from moegraph.lowering import lower
from moegraph.passes.contract import PassContext
from tests.small_models import small_spec

F64 = torch.float64
TOKENS, WIDTH = 3, 4


@lru_cache(maxsize=1)
def context() -> PassContext:
    """A context whose spec is the small one."""
    return PassContext(lower(small_spec()))


def unit_of(body: Callable[[GraphBuilder, fx.Node], fx.Node]) -> Unit:
    """A kind `block` with hidden [3, 4] in and `body(builder, hidden)` out, at the layer level."""
    builder = GraphBuilder("lower")
    hidden = builder.input("hidden", (TOKENS, WIDTH), F64)
    builder.output("hidden", "hidden", body(builder, hidden))
    return Unit("block", {"layer": builder.finish("block")})


def weight(builder: GraphBuilder, name: str = "w") -> fx.Node:
    """A square matrix."""
    return builder.parameter(Parameter(name, (WIDTH, WIDTH), "matrix", "normal", 0.5, dtype=F64))


def names(unit: Unit) -> list[str]:
    """Names of the calls of the layer graph, in order."""
    return [display_name(n) for n in unit.graphs["layer"].graph.nodes if n.op == "call_function"]
