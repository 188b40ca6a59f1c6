"""fold-casts: a quantiser goes into the operator that makes what it quantises.

    rows = permute(x, …);  q = quantize(rows)          =>   q = permute_quantize(x, …)
    z, a = mx_up_swiglu(…);  q = quantize(a)           =>   z, q = mx_up_swiglu_quantized(…)
    dz, … = mx_dgrad_swiglu(…);  q = quantize(dz)      =>   dz, …, q = mx_dgrad_swiglu_quantized(…)
    z, a = …_quantized(…);  q = quantize(z)            =>   q, a = mx_up_swiglu_saved(…)
    z = dequantize(q);  dz, … = …_quantized(…, z, …)   =>   dz, … = mx_dgrad_swiglu_saved(…, q, …)
    a = swiglu(z);  q = quantize(a)                    =>   a, q = swiglu_kept_quantized(z)         see fold_gated

Rows are quantised one by one, so that x is quantised once and not for each of a token's experts, and rows in 16 bits
are never written unless something else reads them (a weight gradient in bf16 does). The activation is written in MXFP8
alone, dz in bf16 too, for the weight gradient; lines four and five are for what `save-mxfp8` keeps. FP8 with scales in
blocks goes the same way, by the pass behind its products. Where a scale is of a whole row, which no tile of a product
holds, activations and gradients of fused experts are still quantised by a kernel of their own. On a CPU every number
stays what it was, bit for bit; on a GPU the exponential of the last line is Triton's.

A quantiser stays where it is when what it reads is made by something else, for other rows than its own, and so does one
along the other side of an operand, for a weight gradient (weights, which `prepare-weights` quantises once per optimizer
step, are not looked at). The pass says which and why.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import fx

from moegraph.graph.edit import Rewriter
from moegraph.graph.effects import eliminate_dead_code
from moegraph.graph.names import display_name, facts, target_name
from moegraph.graph.program import Unit
from moegraph.passes.contract import Level, Pass, PassContext, PassResult
from moegraph.passes.fold_gated import fold_gated, gated_activation
from moegraph.passes.low_precision import prefix_of
from moegraph.passes.registry import registry
from moegraph.specs.schema import Spec

_mg = torch.ops.moegraph
_MX, _FP8, _BLOCKS = _mg.mx_quantize_rows.default, _mg.fp8_quantize_rows.default, _mg.fp8_quantize_blocks.default
_ALONG_COLUMNS = (
    _mg.mx_quantize_ragged_columns.default,
    _mg.mx_quantize_tokens.default,
    _mg.fp8_quantize_columns_t.default,
)
# What quantises rows as they are gathered, in the place of each quantiser.
_GATHERING: dict[Any, Any] = {
    _MX: _mg.mx_permute_quantize.default,
    _FP8: _mg.fp8_permute_quantize.default,
    _BLOCKS: _mg.fp8_permute_quantize_blocks.default,
}
_TRANSPOSES = (torch.ops.aten.t.default, torch.ops.aten.transpose.int)


@registry.register
@dataclass(frozen=True)
class FoldCasts(Pass):
    """Folds the quantisers of activations and gradients into what makes them."""

    name: ClassVar[str] = "fold-casts"
    level: ClassVar[Level] = "step"
    requires: ClassVar[frozenset[str]] = frozenset({"joint", "cast"})
    provides: ClassVar[frozenset[str]] = frozenset({"folded-casts"})

    @classmethod
    def from_spec(cls, spec: Spec) -> FoldCasts | None:
        low = spec.precision.fp8 != "off" or spec.precision.mxfp8.parts
        return cls() if low and spec.passes.fold_casts.enabled else None

    def apply(self, unit: Unit, context: PassContext) -> PassResult:
        recomputed = unit.options.get("recompute", "none") != "none"
        folder = Folder(Rewriter(unit.graphs["joint"], self.name), recomputed)
        kept = []
        quantisers = [node for target in _GATHERING for node in folder.rewriter.find(target)]
        # What is saved, with plain scales, comes after what the products read.
        rows = sorted((node for node in quantisers if not _is_of_weight(node)), key=lambda node: _is_plain(node))
        for node in [*rows, *folder.rewriter.find(_mg.mx_dequantize_rows.default)]:
            reason = folder.fold(node)
            if reason:
                kept.append(f"{display_name(node)}: {reason}")
        columns = [display_name(node) for target in _ALONG_COLUMNS for node in folder.rewriter.find(target)]
        if columns:
            kept.append(f"{', '.join(columns)}: along the other side, for weight gradients")
        note = "; ".join(kept)
        if not folder.rewriter.rewritten:
            return PassResult(unit, note=note or "nothing but weights is quantised in this block")
        folder.rewriter.rewritten += map(display_name, eliminate_dead_code(folder.rewriter.graph))
        joint = folder.rewriter.finish()
        # What was made on the way and is in neither graph is nobody's concern.
        there = {display_name(node) for module in (unit.graphs["joint"], joint) for node in module.graph.nodes}
        rewritten = [name for name in dict.fromkeys(folder.rewriter.rewritten) if name in there]
        return PassResult(unit.with_graphs({"joint": joint}), rewritten, note)


@dataclass
class Folder:
    """Rewrites the quantisers of one joint graph; `recomputed`: backward computes again what is cheap."""

    rewriter: Rewriter
    recomputed: bool = False
    made: dict[Any, dict[int, fx.Node]] = field(default_factory=dict)

    def fold(self, node: fx.Node) -> str:
        """Folds one quantiser of rows, or what restores them; why not, where it stays."""
        if node.target is _mg.mx_dequantize_rows.default:
            return _restored(self, node)
        source: Any = node.args[0]
        call, index = source, None
        if source.target is operator.getitem:
            call, index = source.args
        key = (call.target, index, node.target)
        if key not in _FOLDS:
            if gated := gated_activation(source):
                return fold_gated(self, node, gated)
            return f"{display_name(source)} comes from {target_name(call)}, which does not quantise"
        return _FOLDS[key](self, node)

    def call(self, at: fx.Node, like: fx.Node, what: str, target: Any, args: tuple[Any, ...]) -> dict[int, fx.Node]:
        """The results of a call before `at`, taken apart, credited to the layer node of `like`; made once for the same
        arguments and direction."""
        key = (target, args, facts(like)["direction"])
        if key not in self.made:
            origin = {name: facts(like)[name] for name in ("layer", "direction")}
            made = self.rewriter.call_before(at, f"{prefix_of(like)}{what}", target, *args)
            parts = {}
            for index in range(len(made.meta["val"])):
                name = f"{prefix_of(like)}getitem"
                parts[index] = self.rewriter.call_before(at, name, operator.getitem, made, index)
            for each in (made, *parts.values()):
                facts(each).update(origin)
            self.made[key] = parts
        return self.made[key]

    def replace_results(self, node: fx.Node, by: dict[int, fx.Node]) -> None:
        """The results of `node` by index are these; `node` goes."""
        for index, taken in self.rewriter.results(node).items():
            self.rewriter.replace(taken, by[index])
        self.rewriter.rewritten.append(display_name(node))
        self.rewriter.graph.erase_node(node)

    def remove_unused(self, node: fx.Node) -> None:
        """Removes a node that nothing reads any more."""
        if not node.users:
            self.rewriter.rewritten.append(display_name(node))
            self.rewriter.graph.erase_node(node)


def _permuted(folder: Folder, node: fx.Node) -> str:
    """The quantiser of rows that `permute` gathered."""
    rows, offsets, *layout = node.args
    assert isinstance(rows, fx.Node)
    if rows.args[3] is not offsets:
        return f"{display_name(rows)} is of other rows"
    target = _GATHERING[node.target]
    folder.replace_results(node, folder.call(node, node, "rows_quantize", target, (*rows.args, *layout)))
    folder.remove_unused(rows)
    return ""


def _activation(folder: Folder, node: fx.Node) -> str:
    """The quantiser of the activation that an up projection writes, where nothing else reads it."""
    act: Any = node.args[0]
    up = act.args[0]
    if len(act.users) > 1:
        return f"{display_name(act)} is read in 16 bits too"
    parts, problem = _product(folder, node, up, "up_quantized")
    if problem:
        return problem
    folder.replace_results(node, {0: parts[1], 1: parts[2]})
    folder.remove_unused(act)
    folder.replace_results(up, parts)
    return ""


def _gradient(folder: Folder, node: fx.Node) -> str:
    """The quantiser of the gradient of a pre-activation."""
    dz: Any = node.args[0]
    product = dz.args[0]
    parts, problem = _product(folder, node, product, "dgrad_quantized")
    if problem:
        return problem
    folder.replace_results(node, {0: parts[3], 1: parts[4]})
    folder.replace_results(product, parts)
    return ""


def _saved(folder: Folder, node: fx.Node) -> str:
    """The quantiser of a pre-activation that nothing else reads; its scales are plain."""
    z: Any = node.args[0]
    up = z.args[0]
    if len(z.users) > 1:
        return f"{display_name(z)} is read in 16 bits too"
    if not _is_plain(node):
        return "its scales are swizzled, and those of what is kept are plain"
    if up.args[4] is not node.args[1]:
        return f"{display_name(up)} is of other rows"
    parts = folder.call(up, up, "up_saved", _mg.mx_up_swiglu_saved.default, up.args)
    folder.replace_results(node, parts)
    folder.remove_unused(z)
    folder.replace_results(up, {1: parts[2], 2: parts[3]})
    return ""


def _restored(folder: Folder, node: fx.Node) -> str:
    """What restores a pre-activation for the product that reads it."""
    product, *others = node.users
    if others or product.target is not _mg.mx_dgrad_swiglu_quantized.default:
        return f"{target_name(product)} reads it in 16 bits"
    arguments = tuple(part for each in product.args for part in (node.args if each is node else (each,)))
    parts = folder.call(product, product, "dgrad_saved", _mg.mx_dgrad_swiglu_saved.default, arguments)
    folder.replace_results(product, parts)
    folder.remove_unused(node)
    return ""


def _is_of_weight(quantiser: fx.Node) -> bool:
    """Whether it quantises a parameter, either way round."""
    source: Any = quantiser.args[0]
    while source.target in _TRANSPOSES:
        source = source.args[0]
    return bool(source.op == "placeholder" and quantiser.args[1] is None)


def _is_plain(quantiser: fx.Node) -> bool:
    return quantiser.target is _MX and not quantiser.args[2]


def _product(folder: Folder, node: fx.Node, product: fx.Node, what: str) -> tuple[dict[int, fx.Node], str]:
    """The results of a product that quantises what `node` did; or why there cannot be one."""
    target, arguments = _QUANTISING[product.target], list(product.args)
    names = [argument.name for argument in product.target._schema.arguments]  # type: ignore[union-attr]
    if node.target is _MX:
        swizzled = arguments.pop()
        if not (swizzled and node.args[2]):
            return {}, "its scales or those of the product are not swizzled"
    if arguments[names.index("offsets")] is not node.args[1]:
        return {}, f"{display_name(product)} is of other rows"
    if facts(product)["direction"] != facts(node)["direction"]:
        return {}, f"{display_name(product)} runs in the other direction, and nothing quantised is kept"
    return folder.call(product, product, what, target, tuple(arguments)), ""


# Products of experts, and those that write what they make in 8 bits.
_QUANTISING: dict[Any, Any] = {
    _mg.mx_up_swiglu.default: _mg.mx_up_swiglu_quantized.default,
    _mg.mx_dgrad_swiglu.default: _mg.mx_dgrad_swiglu_quantized.default,
    _mg.fp8_block_up_swiglu.default: _mg.fp8_block_up_swiglu_quantized.default,
    _mg.fp8_block_dgrad_swiglu.default: _mg.fp8_block_dgrad_swiglu_quantized.default,
}
# What makes the rows, which of its results they are (None: its only one), and the quantiser.
_FOLDS: dict[tuple[Any, int | None, Any], Callable[[Folder, fx.Node], str]] = {
    **{(_mg.permute.default, None, quantiser): _permuted for quantiser in _GATHERING},
    (_mg.mx_up_swiglu.default, 1, _MX): _activation,
    (_mg.mx_dgrad_swiglu.default, 0, _MX): _gradient,
    (_mg.mx_up_swiglu_quantized.default, 0, _MX): _saved,
    (_mg.fp8_block_up_swiglu.default, 1, _BLOCKS): _activation,
    (_mg.fp8_block_dgrad_swiglu.default, 0, _BLOCKS): _gradient,
}
