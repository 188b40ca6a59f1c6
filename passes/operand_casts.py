"""How the operands of a product will come to 8 bits, told from a joint graph in which nothing is cast yet.

What the casts put in are quantisers of their own; where `fold-casts` follows, most of them go into what makes their
values (its docstring has the rewrites). A price has to be that of the graph at the end.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from moegraph.graph.names import facts
from moegraph.graph.precision_cost import Cast, Form
from moegraph.ops.swiglu_quantize import SHARING
from moegraph.passes.gated_activations import activation_of, gradient_of
from moegraph.passes.low_precision import Product
from moegraph.specs.schema import Spec

_mg = torch.ops.moegraph
_take: Any = operator.getitem


@dataclass(frozen=True)
class Folding:
    """What happens to quantisers after the cast: whether they are folded, whether backward computes activations again,
    in which case forward writes them in 8 bits only, and whether rows and their gradients arrive in MXFP8."""

    enabled: bool = True
    recomputed: bool = False
    arriving: bool = False

    @classmethod
    def from_spec(cls, spec: Spec) -> Folding:
        """That of a spec; with a policy for some layers only, of the others."""
        recompute = spec.passes.recompute
        recomputed = recompute.enabled and recompute.policy != "none" and recompute.layers == "all"
        arriving = spec.precision.mxfp8.dispatch == "on" and spec.layout.ep > 1
        return cls(spec.passes.fold_casts.enabled, recomputed, arriving)


@dataclass(frozen=True)
class Operands:
    """The casts of operands in one format: `scales` as `swiglu_quantize` names them."""

    scales: str
    folding: Folding

    @property
    def written_by_products(self) -> bool:
        """Whether fused experts write what they make in 8 bits: not where a scale is of a whole row."""
        return self.folding.enabled and self.scales != "fp8"

    @property
    def arrive(self) -> bool:
        """Whether rows that another rank sent are there in this format."""
        return self.folding.arriving and self.scales == "mx"

    def casts(self, product: Product, low: Collection[fx.Node]) -> tuple[Cast, ...]:
        """Those of a product's operands but weights. `low`: the products before it that are cast."""
        node, rows = product.node, product.rows
        args: Any = node.args
        if product.kind == "weight gradient":
            again = product.part != "experts" and any(other.args[-1] is args[-1] for other in low)
            return Cast("gradient", rows * product.n), Cast("rows", rows * product.k, "made" if again else "kernel")
        if node.target is _mg.expert_ffn.default:
            return self._experts(product)
        source = product.operand or args[0]
        what = "rows" if facts(node)["direction"] == "forward" else "gradient"
        return (self._cast(what, source, rows * product.k, low),)

    def _experts(self, product: Product) -> tuple[Cast, ...]:
        """Of fused experts: rows that the product gathered itself, and the activation."""
        d, f, copies = product.k, product.n // 3, product.node.args[9]
        assert isinstance(copies, int)
        gathered: Form = "rows" if self.folding.enabled else "gathered"
        if self.arrive:
            gathered = "arrived"
        activation: Form = "instead" if self.written_by_products else "kernel"
        rows = Cast("rows", product.rows * d, gathered, copies)
        return rows, Cast("activation", product.rows * f, activation)

    def _cast(self, what: str, source: fx.Node, elements: int, low: Collection[fx.Node]) -> Cast:
        if self.arrive and _comes_from_ranks(source):
            return Cast(what, elements, "arrived")
        if not self.folding.enabled:
            return Cast(what, elements)
        if source.target is _mg.permute.default:
            copies = source.args[4]
            assert isinstance(copies, int)
            return Cast(what, elements, "rows", copies)
        made_by: Any = source.args[0] if source.target is _take else None
        if made_by is not None and made_by.target is _mg.expert_ffn_dgrad.default:
            return Cast(what, elements, "beside" if self.written_by_products and made_by in low else "kernel")
        width = source.meta["val"].shape[1]
        if width % SHARING[self.scales] == 0 and activation_of(source):
            alone = self.folding.recomputed or len(source.users) == 1
            return Cast("activation", elements, "instead" if alone else "beside")
        if width % (2 * SHARING[self.scales]) == 0 and gradient_of(source):
            return Cast(what, elements, "beside")
        return Cast(what, elements)


def _comes_from_ranks(rows: fx.Node) -> bool:
    """Whether rows of experts that are spread over ranks are what was sent, at most in another order."""
    made_by: Any = rows.args[0] if rows.target is _take else rows
    return made_by.target in (_mg.permute.default, _mg.direct_dispatch.default, _mg.direct_put.default)
