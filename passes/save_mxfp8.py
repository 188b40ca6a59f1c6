"""save-mxfp8: the experts' pre-activation is kept for backward in MXFP8, 8.25 bits an element instead of 16.

    z = up(…)                                  z = up(…);  q = quantize(z)         forward; q is kept instead of z
    …                              =>          …
    dz, … = dgrad_swiglu(g, z, …)              z' = dequantize(q)                  backward
                                               dz, … = dgrad_swiglu(g, z', …)

Off unless `precision.mxfp8.saved: on`. Of fused experts (`fuse-experts`) z is nearly all that is kept. The forward pass
reads z as it was; the gradient of the activation, the weight gradient of the down projection and the gradient of the
router weight read it rounded, in any format the products themselves have. Where backward makes z again there is nothing
to do, and the pass says so.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from moegraph.graph.edit import Rewriter
from moegraph.graph.names import display_name, facts
from moegraph.graph.program import Unit
from moegraph.passes.contract import Level, Pass, PassContext, PassResult, Tier
from moegraph.passes.low_precision import prefix_of
from moegraph.passes.registry import registry
from moegraph.specs.schema import Spec

_mg = torch.ops.moegraph
_Z: dict[Any, int] = {  # which argument is the pre-activation
    _mg.expert_ffn_dgrad.default: 1,
    _mg.mx_dgrad_swiglu.default: 4,
    _mg.fp8_dgrad_swiglu.default: 4,
    _mg.fp8_block_dgrad_swiglu.default: 4,
}


@registry.register
@dataclass(frozen=True)
class SaveMxfp8(Pass):
    """Quantises what the gradient of the experts' activation keeps."""

    name: ClassVar[str] = "save-mxfp8"
    level: ClassVar[Level] = "step"
    tier: ClassVar[Tier] = "close"
    tolerance: ClassVar[float] = 0.15  # an element of z is within 1/16 of its value, and slopes are not linear in it
    requires: ClassVar[frozenset[str]] = frozenset({"joint"})
    conflicts: ClassVar[frozenset[str]] = frozenset({"folded-casts"})

    @classmethod
    def from_spec(cls, spec: Spec) -> SaveMxfp8 | None:
        return cls() if spec.precision.mxfp8.saved == "on" else None

    def apply(self, unit: Unit, context: PassContext) -> PassResult:
        if unit.options.get("recompute", "none") == "full":
            return PassResult(unit, note="policy full recomputes the pre-activation, and keeps none")
        rewriter, kept = Rewriter(unit.graphs["joint"], self.name), []
        for node in [node for node in rewriter.graph.nodes if node.target in _Z]:
            z: Any = node.args[_Z[node.target]]
            if facts(z)["direction"] == "forward":
                _save(rewriter, node, z)
            else:
                kept.append(f"{display_name(z)} is made again in backward")
        if not rewriter.rewritten:
            return PassResult(unit, note="; ".join(kept) or "no fused experts in this block")
        return PassResult(unit.with_graphs({"joint": rewriter.finish()}), rewriter.rewritten, "; ".join(kept))


def _save(rewriter: Rewriter, node: fx.Node, z: fx.Node) -> None:
    """Quantises z behind what makes it, and restores it in front of `node`."""
    offsets = node.args[[argument.name for argument in node.target._schema.arguments].index("offsets")]  # type: ignore[union-attr]
    call = rewriter.call_before(z.next, f"{prefix_of(z)}save", _mg.mx_quantize_rows.default, z, offsets, False)
    after = call.next
    parts = [rewriter.call_before(after, f"{prefix_of(z)}saved", operator.getitem, call, index) for index in (0, 1)]
    restored = rewriter.call_before(node, f"{prefix_of(node)}restored", _mg.mx_dequantize_rows.default, *parts)
    for each in (call, *parts):
        facts(each).update(layer=facts(z)["layer"], direction="forward")
    facts(restored).update(layer=facts(node)["layer"], direction="backward")
    node.update_arg(_Z[node.target], restored)
    rewriter.rewritten.append(display_name(node))
