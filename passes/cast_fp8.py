"""cast-fp8: products of experts on operands in Hopper's FP8, with the quantisation as nodes of the graph.

`precision.fp8: rowwise` gives each row of an operand an fp32 scale along the contraction; `fp8_wgrad: true` casts the
weight gradients too, with a scale for each expert and column of both operands. `blockwise` gives 128 elements of a row
a scale, and 128 × 128 of a weight (DeepSeek-V3, arXiv 2412.19437): less noise where magnitudes differ along a row, and
slower (docs/performance.md); its weight gradients stay in bf16. Both are recipes of their own, not MXFP8: other scales,
so other loss curves. What changes in the graph is told in `low_precision`.

H200 and H100 have matrix units for it; a CPU emulates the numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from torch import fx

from moegraph.graph.precision_cost import Cast, Decision, decide
from moegraph.graph.program import Unit
from moegraph.passes.cast_mxfp8 import Decided, cast
from moegraph.passes.contract import Level, Pass, PassContext, PassResult, Tier
from moegraph.passes.low_precision import Product, Recipe, products_of
from moegraph.passes.operand_casts import Folding, Operands
from moegraph.passes.registry import registry
from moegraph.specs.schema import Spec

_mg = torch.ops.moegraph
ROWWISE = Recipe(
    "fp8",
    _mg.fp8_quantize_rows.default,
    _mg.fp8_grouped_mm.default,
    _mg.fp8_up_swiglu.default,
    _mg.fp8_dgrad_swiglu.default,
    layout=(),
    rest=(False,),  # exact accumulation costs all that FP8 gains
    columns=_mg.fp8_quantize_columns_t.default,
    wgrad=_mg.fp8_grouped_mm_wgrad.default,
)
BLOCKWISE = Recipe(
    "fp8 in blocks",
    _mg.fp8_quantize_blocks.default,
    _mg.fp8_block_grouped_mm.default,
    _mg.fp8_block_up_swiglu.default,
    _mg.fp8_block_dgrad_swiglu.default,
    layout=(),
    rest=(),
)


@registry.register
@dataclass(frozen=True)
class CastFp8(Pass):
    """Puts FP8 operands into the products of experts, and with `wgrad` into their weight gradients."""

    wgrad: bool = False
    scales: Literal["rowwise", "blockwise"] = "rowwise"
    folding: Folding = field(default_factory=Folding)

    name: ClassVar[str] = "cast-fp8"
    level: ClassVar[Level] = "step"
    tier: ClassVar[Tier] = "close"
    tolerance: ClassVar[float] = 0.15  # several products deep; each alone is near 4 %, 28 dB
    requires: ClassVar[frozenset[str]] = frozenset({"joint"})
    provides: ClassVar[frozenset[str]] = frozenset({"cast"})

    @classmethod
    def from_spec(cls, spec: Spec) -> CastFp8 | None:
        fp8 = spec.precision.fp8
        return cls(spec.precision.fp8_wgrad, fp8, Folding.from_spec(spec)) if fp8 != "off" else None

    def apply(self, unit: Unit, context: PassContext) -> PassResult:
        return cast(unit, self.name, ROWWISE if self.scales == "rowwise" else BLOCKWISE, self.decisions)

    def decisions(self, joint: fx.GraphModule) -> Decided:
        """Every product that could be cast, whether it is, and why."""
        operands = Operands("fp8" if self.scales == "rowwise" else "blocks", self.folding)
        low, decided = set[fx.Node](), Decided()
        for product in products_of(joint.graph):
            found = self.decide(product, operands.casts(product, low))
            decided.append((product, found))
            if found.low:
                low.add(product.node)
        return decided

    def decide(self, product: Product, casts: Sequence[Cast] | None = None) -> Decision:
        """Whether this product is cast, and why. `casts`: those of its operands; left out, kernels of their own."""
        shape = (product.kind, product.n, product.k, product.rows, product.experts)
        found = decide(shape, product.side, "H200", casts=casts)
        if product.kind == "weight gradient" and not self.wgrad:
            rows = self.scales == "rowwise"
            return found.kept("precision.fp8_wgrad is false" if rows else "there is no weight gradient of blocks")
        if self.scales == "blockwise":
            return replace(found, low=True, reason="the spec asks for it; measured slower than this model predicts")
        return found.forced()
