"""cast-mxfp8: products of experts on operands in MXFP8, with the quantisation as nodes of the graph (`low_precision`).

`precision.mxfp8.experts: on` casts each product forward and of the input gradient; `auto` those that a roofline model
of a B300 predicts to gain (`moegraph inspect SPEC --precision` prints every decision with its times). Weight gradients
stay in bf16: their contraction is over rows, so both operands would have to be quantised along their other side, with
every expert's run padded. Router, norms, embeddings, head and attention stay as they are.

Where the device has MX matrix units the products run on them; elsewhere they are emulated: the same numbers, up to the
order of additions, without the speed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from moegraph.graph.edit import Rewriter
from moegraph.graph.names import display_name, facts
from moegraph.graph.precision_cost import Decision, decide
from moegraph.graph.program import Unit
from moegraph.passes.contract import Level, Pass, PassContext, PassResult, Tier
from moegraph.passes.low_precision import Caster, Product, Recipe, products_of
from moegraph.passes.registry import registry
from moegraph.specs.schema import Spec

_mg = torch.ops.moegraph
MXFP8 = Recipe(
    "mxfp8",
    _mg.mx_quantize_rows.default,
    _mg.mx_grouped_mm.default,
    _mg.mx_up_swiglu.default,
    _mg.mx_dgrad_swiglu.default,
    layout=(True,),  # scales as Blackwell's matrix units read them, written by who quantises
    rest=(True,),
)


@registry.register
@dataclass(frozen=True)
class CastMxfp8(Pass):
    """Puts MXFP8 operands into the products of experts."""

    experts: Literal["auto", "on"]

    name: ClassVar[str] = "cast-mxfp8"
    level: ClassVar[Level] = "step"
    tier: ClassVar[Tier] = "close"
    tolerance: ClassVar[float] = 0.15  # several products deep; each alone is near 4 %, 28 dB
    requires: ClassVar[frozenset[str]] = frozenset({"joint"})
    provides: ClassVar[frozenset[str]] = frozenset({"cast"})

    @classmethod
    def from_spec(cls, spec: Spec) -> CastMxfp8 | None:
        experts = spec.precision.mxfp8.experts
        return cls(experts) if experts != "off" else None

    def apply(self, unit: Unit, context: PassContext) -> PassResult:
        return cast(unit, self.name, MXFP8, self.decide)

    def decide(self, product: Product) -> Decision:
        """Whether this product is cast, and why."""
        found = decide((product.kind, product.n, product.k, product.rows, product.experts), product.side)
        if product.kind == "weight gradient":
            return found.kept("a contraction over rows: both operands would be quantised along their other side")
        if product.side % 32 or product.k % 32:
            return found.kept(f"{product.n} and {product.k} are not whole blocks of 32")
        return found.forced() if self.experts == "on" else found


def cast(unit: Unit, made_by: str, recipe: Recipe, decision: Callable[[Product], Decision]) -> PassResult:
    """Casts the products of a block for which the decision says so, and writes the decision on the nodes."""
    rewriter = Rewriter(unit.graphs["joint"], made_by)
    caster = Caster(rewriter, recipe)
    products = products_of(rewriter.graph)
    kept = []
    for product in products:
        found = decision(product)
        facts(product.node)["precision"] = found.to_json()
        if found.low:
            caster.cast(product.node)
        else:
            kept.append(f"{display_name(product.node)}: {found.reason}")
    if not rewriter.rewritten:
        return PassResult(unit, note="; ".join(kept) or "no products of experts in this block")
    return PassResult(unit.with_graphs({"joint": rewriter.finish()}), rewriter.rewritten, "; ".join(kept))
