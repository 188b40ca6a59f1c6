"""fold-casts, where experts are not fused: quantisers of a gated activation and of the gradient of what it is of.

    a = swiglu(z);  q = quantize(a)                  =>   q = swiglu_quantized(z)       nothing else reads a
                                                          a, q = swiglu_kept_quantized(z)
    dz = swiglu_backward(da, z);  q = quantize(dz)   =>   dz, q = swiglu_backward_quantized(da, z)

What a weight gradient reads in 16 bits is written by the same kernel. Where backward computes a again (`recompute`),
forward writes it in 8 bits only, and what computes it in 16 bits stays for backward. A row's one scale (`fp8`) is known
when a kernel has all of the row, as one that reads whole rows of z has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from moegraph.graph.names import display_name, facts
from moegraph.ops.swiglu_quantize import SHARING
from moegraph.passes.gated_activations import GatedActivation, activation_of, gradient_of

if TYPE_CHECKING:
    from moegraph.passes.fold_casts import Folder

_mg = torch.ops.moegraph
_SCALES: dict[Any, str] = {
    _mg.mx_quantize_rows.default: "mx",
    _mg.fp8_quantize_rows.default: "fp8",
    _mg.fp8_quantize_blocks.default: "blocks",
}


def fold_gated(folder: Folder, node: fx.Node, found: GatedActivation) -> str:
    """Folds the quantiser of a gated activation or of a gradient; why not, where it stays."""
    source: Any = node.args[0]
    scales = _SCALES[node.target]
    if reason := _obstacle(node, source, scales):
        return reason
    rest: tuple[Any, ...] = (found.z, node.args[1], found.alpha, found.limit, scales)
    if found.grad is not None:
        target, rest = _mg.swiglu_backward_quantized.default, (found.grad, *rest)
    elif len(source.users) > 1 and not folder.recomputed:
        target = _mg.swiglu_kept_quantized.default
    else:
        target = _mg.swiglu_quantized.default
    kept = target is not _mg.swiglu_quantized.default
    parts = folder.call(source if kept else node, source, "quantized", target, rest)
    folder.replace_results(node, {0: parts[len(parts) - 2], 1: parts[len(parts) - 1]})
    if kept:
        folder.rewriter.replace(source, parts[0])
    else:
        folder.remove_unused(source)
    return ""


def gated_activation(source: fx.Node) -> GatedActivation | None:
    """The activation or gradient that a value is, if it is one."""
    return activation_of(source) or gradient_of(source)


def _obstacle(node: fx.Node, source: fx.Node, scales: str) -> str:
    """Why the quantiser of `source` cannot go into what computes it; empty where it can."""
    if scales == "mx" and not node.args[2]:
        return "its scales are plain, and those of an activation are swizzled"
    halves = 1 if activation_of(source) else 2
    if source.meta["val"].shape[1] % (halves * SHARING[scales]):
        return f"{display_name(source)} is not whole blocks of {SHARING[scales]}"
    if facts(source)["direction"] != facts(node)["direction"]:
        return f"{display_name(source)} is of the other direction, and nothing quantised is kept"
    offsets = node.args[1]
    if isinstance(offsets, fx.Node) and (_behind(offsets, source) or _of_other_rows(source, offsets)):
        return f"{display_name(source)} is of other rows"
    return ""


def _behind(node: fx.Node, other: fx.Node) -> bool:
    """Whether a node stands behind another one in its graph."""
    return next(each for each in node.graph.nodes if each in (node, other)) is other


def _of_other_rows(source: fx.Node, offsets: fx.Node) -> bool:
    """Whether something reads `source` as rows of other offsets: those past the last one are written as zeros."""
    for user in source.users:
        schema = getattr(user.target, "_schema", None)
        names = [argument.name for argument in schema.arguments] if schema is not None else []
        if "offsets" in names and user.args[names.index("offsets")] not in (offsets, None):
            return True
    return False
