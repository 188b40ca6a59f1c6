"""A structural verifier of products in 8 bits: each operand has its own scales, laid out as the product reads them.

Data and scales are two tensors, and scales of other rows or in another layout are wrong numbers without an error. So:
an argument whose name is or ends in `scale` stands behind its data, both come from one quantiser as neighbours, and
where quantiser and product say how scales lie (`swizzled`) or whose rows they are (`offsets`) they say the same. What
enters a graph from outside as data and scale is not looked at.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from moegraph._torch_compat import OpOverload
from moegraph.graph.names import display_name
from moegraph.ops import registry as registry  # registers the operators

_mg = torch.ops.moegraph
# Scales that are plain where an operator does not say how they lie: arguments by name, results by number. All others
# are swizzled then, or not of MXFP8.
_PLAIN_ARGUMENTS = {(_mg.mx_dequantize_rows.default, "scale"), (_mg.mx_dgrad_swiglu_saved.default, "z_scale")}
_PLAIN_RESULTS = {(_mg.mx_up_swiglu_saved.default, 1)}
# Quantisers that pad runs, and give the offsets of what they padded.
_PADDING = {
    _mg.fp8_quantize_columns_t.default,
    _mg.mx_quantize_ragged_columns.default,
    _mg.mx_quantize_ragged_both.default,
}


def operands_with_their_scales(module: fx.GraphModule) -> Iterator[str]:
    """Every operand in 8 bits has the scales that were made with it, for these rows and in this layout."""
    for node in module.graph.nodes:
        given = _arguments(node)
        names = list(given)
        for data, scale in pairwise(names):
            if (scale == "scale" or scale.endswith("_scale")) and isinstance(given[scale], fx.Node):
                problem = _problem(node, scale, given[data], given[scale])
                if problem:
                    yield f"{display_name(node)}: its {data} {problem}"


def _arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call of one of moegraph's operators by name, defaults included."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, OpOverload) or target.namespace != "moegraph":
        return {}
    schema = target._schema.arguments
    given = {argument.name: argument.default_value for argument in schema}
    given.update(zip(given, node.args, strict=False))
    given.update(node.kwargs)
    return given


def _problem(product: fx.Node, name: str, data: fx.Node, scale: fx.Node) -> str:
    if data.op == scale.op == "placeholder":
        return ""
    made_by, index = _result(data)
    if made_by is None or _result(scale) != (made_by, index + 1):
        return f"is {display_name(data)} with {display_name(scale)}, which were not made together"
    reads_plain = (product.target, name) in _PLAIN_ARGUMENTS
    if _swizzled(product, reads_plain) != _swizzled(made_by, (made_by.target, index + 1) in _PLAIN_RESULTS):
        return f"has scales in another layout than it reads: {display_name(made_by)}"
    given, rows = _arguments(product), len(data.meta["val"].shape) == 2
    if rows and "offsets" in given and _arguments(made_by).get("offsets") is not _offsets(given["offsets"]):
        return f"was quantised for the rows of other offsets: {display_name(made_by)}"
    return ""


def _swizzled(node: fx.Node, plain: bool) -> bool:
    return bool(_arguments(node).get("swizzled", not plain))


def _offsets(node: Any) -> Any:
    """The offsets of the rows; of runs that a quantiser padded, those that it was given."""
    made_by, _ = _result(node)
    return node if made_by is None or made_by.target not in _PADDING else _arguments(made_by)["offsets"]


def _result(node: Any) -> tuple[fx.Node | None, int]:
    """The call that a taken-apart result comes from, and which it is."""
    if isinstance(node, fx.Node) and node.target is operator.getitem:
        return node.args[0], node.args[1]  # type: ignore[return-value]
    return None, -1
