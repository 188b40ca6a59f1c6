"""cast-mxfp8: products on operands in MXFP8, with the quantisation as nodes of the graph (`low_precision`).

`precision.mxfp8.experts: on` casts each product of the experts forward and of the input gradient, `shared` those of
shared experts and `attention` those of its projections (`dense_products`); `auto` those that a roofline model of a B300
predicts to gain with its casts as `fold-casts` will leave them (`moegraph inspect SPEC --precision` prints every
decision with its times). Weight gradients of what is cast stay in bf16 unless `wgrad: mxfp8` casts them too: their
contraction is over rows, so both operands are quantised again, along their other side. Zeros complete the last block of
32 tokens, and of experts those of every run. Router, norms, embeddings, head and the core of attention stay as they
are.

Where the device has MX matrix units the products run on them; elsewhere they are emulated: the same numbers, up to the
order of additions, without the speed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from torch import fx

from moegraph.graph.edit import Rewriter
from moegraph.graph.effects import eliminate_dead_code
from moegraph.graph.names import display_name, facts
from moegraph.graph.precision_cost import Cast, Decision, decide
from moegraph.graph.program import Unit
from moegraph.passes.contract import Level, Pass, PassContext, PassResult, Tier
from moegraph.passes.dense_products import cast_dense, dense_products
from moegraph.passes.low_precision import Caster, Product, Recipe, products_of
from moegraph.passes.operand_casts import Folding, Operands
from moegraph.passes.registry import registry
from moegraph.specs.schema import Spec

_mg = torch.ops.moegraph
Choice = Literal["auto", "on", "off"]
Decided = list[tuple[Product, Decision]]
MXFP8 = Recipe(
    "mxfp8",
    _mg.mx_quantize_rows.default,
    _mg.mx_grouped_mm.default,
    _mg.mx_up_swiglu.default,
    _mg.mx_dgrad_swiglu.default,
    layout=(True,),  # scales as Blackwell's matrix units read them, written by who quantises
    rest=(True,),
    columns=_mg.mx_quantize_ragged_columns.default,
    wgrad=_mg.mx_grouped_mm_wgrad.default,
)


@registry.register
@dataclass(frozen=True)
class CastMxfp8(Pass):
    """Puts MXFP8 operands into products of experts, of shared experts and of attention's projections."""

    experts: Choice
    shared: Choice = "off"
    attention: Choice = "off"
    wgrad: Literal["bf16", "mxfp8"] = "bf16"
    folding: Folding = field(default_factory=Folding)

    name: ClassVar[str] = "cast-mxfp8"
    level: ClassVar[Level] = "step"
    tier: ClassVar[Tier] = "close"
    tolerance: ClassVar[float] = 0.15  # several products deep; each alone is near 4 %, 28 dB
    requires: ClassVar[frozenset[str]] = frozenset({"joint"})
    provides: ClassVar[frozenset[str]] = frozenset({"cast"})

    @classmethod
    def from_spec(cls, spec: Spec) -> CastMxfp8 | None:
        mx = spec.precision.mxfp8
        return cls(mx.experts, mx.shared, mx.attention, mx.wgrad, Folding.from_spec(spec)) if mx.parts else None

    def bound(self, compute: str) -> float:
        """Wider with attention: gradients of queries and keys are differences that the softmax leaves small."""
        return 0.4 if self.attention != "off" else self.tolerance

    def apply(self, unit: Unit, context: PassContext) -> PassResult:
        return cast(unit, self.name, MXFP8, self._asked)

    def _asked(self, joint: fx.GraphModule) -> Decided:
        """The decisions for parts of the model that are not off."""
        return [(product, found) for product, found in self.decisions(joint) if self._choice(product) != "off"]

    def _choice(self, product: Product) -> Choice:
        return {"experts": self.experts, "shared": self.shared, "attention": self.attention}[product.part]

    def decisions(self, joint: fx.GraphModule) -> Decided:
        """Every product that could be cast, whether it is, and why. Rows that one product quantises are there for
        others."""
        operands, low, first = Operands("mx", self.folding), set[fx.Node](), Decided()
        for product in (*products_of(joint.graph), *dense_products(joint)):
            found = self.decide(product, operands.casts(product, low))
            first.append((product, found))
            if found.low:
                low.add(product.node)
        made = {_operand(product) for product, found in first if found.low and product.operand is not None}
        return [(p, self._again(p, found) if _operand(p) in made else found) for p, found in first]

    def _again(self, product: Product, found: Decision) -> Decision:
        """The decision for a product whose operand is quantised for another one, where that is not cast yet."""
        return found if found.low else self.decide(product, [replace(cast, form="made") for cast in found.casts])

    def decide(self, product: Product, casts: Sequence[Cast] | None = None) -> Decision:
        """Whether this product is cast, and why. `casts`: those of its operands; left out, kernels of their own."""
        shape = (product.kind, product.n, product.k, product.rows, product.experts)
        found = decide(shape, product.side, casts=casts)
        if self._choice(product) == "off":
            return found.kept(f"precision.mxfp8.{product.part} is off")
        weight_gradient = product.kind == "weight gradient"
        if weight_gradient and self.wgrad == "bf16":
            return found.kept("precision.mxfp8.wgrad is bf16")
        if not weight_gradient and (product.side % 32 or product.k % 32):
            return found.kept(f"{product.n} and {product.k} are not whole blocks of 32")
        return found.forced() if self._choice(product) == "on" else found


def _operand(product: Product) -> tuple[fx.Node | None, str]:
    """What is quantised once: a value in one direction, forward or backward."""
    return product.operand, facts(product.node)["direction"]


def cast(unit: Unit, made_by: str, recipe: Recipe, decisions: Callable[[fx.GraphModule], Decided]) -> PassResult:
    """Casts the products of a block for which the decisions say so, and writes the decisions on the nodes."""
    rewriter = Rewriter(unit.graphs["joint"], made_by)
    caster = Caster(rewriter, recipe)
    kept = []
    for product, found in decisions(rewriter.module):
        facts(product.node)["precision"] = found.to_json()
        if not found.low:
            kept.append(f"{display_name(product.node)}: {found.reason}")
        elif product.part == "experts":
            caster.cast(product.node)
        else:
            cast_dense(caster, product)
    if not rewriter.rewritten:
        return PassResult(unit, note="; ".join(kept) or "nothing here that the spec casts")
    eliminate_dead_code(rewriter.graph)
    return PassResult(unit.with_graphs({"joint": rewriter.finish()}), rewriter.rewritten, "; ".join(kept))
