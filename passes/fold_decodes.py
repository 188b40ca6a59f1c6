"""fold-decodes: what makes bf16 of rows that arrived in MXFP8 goes into the weight gradient that reads it.

    x    = mx_decode(p)                               =>   d_w = payload_grouped_mm_wgrad(d_y, p, offsets)
    d_w  = grouped_mm_wgrad(d_y, x, offsets)

and the same of d_y, the gradient of `combine`. The copy in bf16, twice the bytes of what arrived, is then neither
written nor kept. Whether a GPU dequantises as the product loads, or decodes inside the operator, is the operator's
choice (`moegraph.ops.payload_wgrad.payload_backend`): in the matrix unit's loop every element is dequantised again for
every 128 columns of the other side, so where a weight is wide, one copy at memory speed costs less.

A decode stays where something else reads it in bf16 (a product of experts in bf16, a quantiser): the copy is made
anyway, and to read it is cheaper than to make it again. The pass says which. Runs behind `recompute`, so that what
backward computes again counts; before `accumulate-gradients` or behind it. Every number stays what it was.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from moegraph.graph.edit import Rewriter
from moegraph.graph.names import display_name, facts, target_name
from moegraph.graph.program import Unit
from moegraph.passes.contract import Level, Pass, PassContext, PassResult
from moegraph.passes.registry import registry
from moegraph.specs.schema import Spec

_mg = torch.ops.moegraph
_DECODE = _mg.mx_decode.default
# Each weight gradient as that of payloads, in which gradient and rows are the same two arguments before the offsets.
_OF_PAYLOADS: dict[Any, Any] = {
    _mg.grouped_mm_wgrad.default: _mg.payload_grouped_mm_wgrad.default,
    _mg.grouped_mm_wgrad_add.default: _mg.payload_grouped_mm_wgrad_add.default,
    _mg.payload_grouped_mm_wgrad.default: _mg.payload_grouped_mm_wgrad.default,
    _mg.payload_grouped_mm_wgrad_add.default: _mg.payload_grouped_mm_wgrad_add.default,
}


@registry.register
@dataclass(frozen=True)
class FoldDecodes(Pass):
    """Folds decodes of payloads into the weight gradients that read them."""

    name: ClassVar[str] = "fold-decodes"
    level: ClassVar[Level] = "step"
    requires: ClassVar[frozenset[str]] = frozenset({"joint"})

    @classmethod
    def from_spec(cls, spec: Spec) -> FoldDecodes | None:
        return cls() if spec.precision.mxfp8.dispatch != "off" and spec.passes.fold_decodes.enabled else None

    def apply(self, unit: Unit, context: PassContext) -> PassResult:
        rewriter = Rewriter(unit.graphs["joint"], self.name)
        kept = []
        for decode in rewriter.find(_DECODE):
            others = [user for user in decode.users if not _reads_rows(user, decode)]
            if others:
                names = ", ".join(sorted({target_name(user) for user in others}))
                kept.append(f"{display_name(decode)}: {names} reads it in bf16")
            else:
                _fold(rewriter, decode)
        note = "; ".join(kept)
        if not rewriter.rewritten:
            return PassResult(unit, note=note or "nothing is decoded in this block")
        return PassResult(unit.with_graphs({"joint": rewriter.finish()}), list(dict.fromkeys(rewriter.rewritten)), note)


def _reads_rows(user: fx.Node, decode: fx.Node) -> bool:
    """Whether the node is a weight gradient of the decoded rows."""
    return user.target in _OF_PAYLOADS and decode in user.args[-3:-1]


def _fold(rewriter: Rewriter, decode: fx.Node) -> None:
    """Gives the readers the payload. They stay the nodes that they are: one that adds to a buffer is an effect."""
    for user in list(decode.users):
        user.target = _OF_PAYLOADS[user.target]
        user.replace_input_with(decode, decode.args[0])  # type: ignore[arg-type]
        facts(user)["made_by"] = rewriter.made_by
        rewriter.evaluate(user)
        rewriter.rewritten.append(display_name(user))
    rewriter.rewritten.append(display_name(decode))
    rewriter.graph.erase_node(decode)
