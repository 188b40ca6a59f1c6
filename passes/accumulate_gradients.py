"""accumulate-gradients: the gradient of a weight is added to its buffer by the operator that makes it.

    grad = grouped_mm_wgrad(dz, rows, offsets)         done = grouped_mm_wgrad_add(buffer!, keep, dz, rows, offsets)
    grad = mm(t(dz), x)                         =>     done = linear_wgrad_add(buffer!, keep, dz, x)
    grad = embedding_wgrad(dz, ids, V)                 done = embedding_wgrad_add(buffer!, keep, dz, ids, V)
    return …, grad                                     return …, done

Otherwise the runtime adds what the graph returns: the gradient, as large as the weight (of experts: all those of a
rank), is written in the compute dtype, read again and added. `buffer` is a view of the flat gradient buffer and `keep`
says whether it holds a gradient of this step, so one graph serves all layers and all micro-batches. These are the only
operators of a graph that write to an argument; each buffer is written by one of them. Gradients of norms and biases are
small, and sums: the runtime adds them.

On a CPU every number stays what it was. On a GPU the product is added in fp32 without being rounded to the compute
dtype first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from moegraph import ops
from moegraph.graph.edit import Rewriter
from moegraph.graph.names import display_name, facts, identifier, target_name
from moegraph.graph.program import Port, Unit, ports, results
from moegraph.passes.contract import Level, Pass, PassContext, PassResult
from moegraph.passes.registry import registry
from moegraph.specs.schema import Spec

_aten = torch.ops.aten
_LINEAR = torch.ops.moegraph.linear_wgrad_add.default


@registry.register
@dataclass(frozen=True)
class AccumulateGradients(Pass):
    """Turns gradients that one product, or the embedding, makes into sums in their buffers."""

    name: ClassVar[str] = "accumulate-gradients"
    level: ClassVar[Level] = "step"
    requires: ClassVar[frozenset[str]] = frozenset({"joint"})

    @classmethod
    def from_spec(cls, spec: Spec) -> AccumulateGradients | None:
        return cls() if spec.passes.accumulate_gradients.enabled else None

    def apply(self, unit: Unit, context: PassContext) -> PassResult:
        rewriter = Rewriter(unit.graphs["joint"], self.name)
        master = torch.float64 if context.spec.precision.compute == "fp64" else torch.float32
        output, kept = rewriter.output_node(), []
        for port, node in zip(ports(rewriter.module, "outputs"), results(rewriter.module), strict=True):
            found = _made_by(node) if port.role == "grad" and list(node.users) == [output] else None
            if found is not None:
                _accumulate(rewriter, port.name, node, found, master)
            elif port.role == "grad" and node.target in ops.WEIGHT_GRADIENTS:
                kept.append(f"{port.name}: {target_name(node)} adds nothing to a buffer, the runtime does")
        note = "; ".join(kept)
        if not rewriter.rewritten:
            return PassResult(unit, note=note or "no gradient here is the result of one product")
        return PassResult(unit.with_graphs({"joint": rewriter.finish()}), rewriter.rewritten, note)


@dataclass(frozen=True)
class _Made:
    """What makes a gradient, the operator that adds it instead, that one's arguments behind buffer and flag, and the
    nodes that only the gradient may have needed, readers first."""

    by: fx.Node
    adding: Any
    args: tuple[Any, ...]
    behind: tuple[fx.Node, ...] = ()


def _made_by(gradient: fx.Node) -> _Made | None:
    """The operator that makes a gradient, if it is one that can add it; a linear layer's is transposed to and fro."""
    if gradient.target in ops.ACCUMULATIONS:
        return _Made(gradient, ops.ACCUMULATIONS[gradient.target], gradient.args)
    chain = [gradient]
    while chain[-1].target is _aten.t.default and (chain[-1] is gradient or len(chain[-1].users) == 1):
        chain.append(chain[-1].args[0])  # type: ignore[arg-type]
    product = chain[-1]
    if product.target is not _aten.mm.default or len(product.users) != 1 or len(chain) % 2 == 0:
        return None
    left, right = product.args
    if not isinstance(left, fx.Node) or left.target is not _aten.t.default:
        return None
    return _Made(product, _LINEAR, (left.args[0], right), (*chain[1:], left))


def _accumulate(rewriter: Rewriter, parameter: str, gradient: fx.Node, made: _Made, master: torch.dtype) -> None:
    product = made.by
    buffer = _input(rewriter, Port("gradient_buffer", parameter), product, tuple(gradient.meta["val"].shape), master)
    keep = _input(rewriter, Port("keep", parameter), product, (1,), torch.int32)
    name = f"{display_name(product)}_add"
    done = rewriter.call_before(product, name, made.adding, buffer, keep, *made.args)
    facts(done).update(
        {key: facts(product)[key] for key in ("layer", "direction", "overlaps") if key in facts(product)}
    )
    rewriter.replace(gradient, done)
    for node in made.behind:
        if not node.users:
            rewriter.graph.erase_node(node)
    outputs = [Port("added" if port == ("grad", parameter) else port[0], port[1]) for port in _outputs(rewriter)]
    rewriter.module.meta["outputs"] = tuple(outputs)
    result = rewriter.output_node()
    result.meta["val"] = tuple(node.meta["val"] for node in results(rewriter.module))


def _outputs(rewriter: Rewriter) -> tuple[Port, ...]:
    return ports(rewriter.module, "outputs")


def _input(rewriter: Rewriter, port: Port, product: fx.Node, shape: tuple[int, ...], dtype: torch.dtype) -> fx.Node:
    """A new input of the graph, behind those that it has."""
    name = f"{port.role}.{port.name}"
    last = rewriter.graph.find_nodes(op="placeholder")[-1]
    with rewriter.graph.inserting_after(last):
        node = rewriter.graph.placeholder(identifier(name))
    value: Any = product.meta["val"]
    node.meta["val"] = value.new_empty(shape, dtype=dtype)
    facts(node).update(name=name, layer=name, direction="backward", made_by=rewriter.made_by)
    rewriter.module.meta["inputs"] = (*ports(rewriter.module, "inputs"), port)
    return node
