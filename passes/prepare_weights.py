"""prepare-weights: what depends on weights alone is computed once per optimizer step, not in every micro-batch.

    forward(w, x, …):  qw = quantize(w);  …            prepare(w):            qw = quantize(w), qt = quantize(wᵀ)
    backward(w, …):    qt = quantize(wᵀ); …     =>     forward(qw, x, …), backward(qt, …)

The quantised weights, both ways round, become inputs of the step graphs: one for each, also where recomputation has
written the same call twice. The runtime runs `prepare` of a block when one
of its graphs is wanted for the first time after the weights have changed.
"""

from __future__ import annotations

import copy
import operator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import fx

from moegraph._torch_compat import deferred_graph_module
from moegraph.graph.edit import Rewriter
from moegraph.graph.effects import eliminate_dead_code
from moegraph.graph.names import display_name, facts, identifier
from moegraph.graph.program import Port, Unit, ports
from moegraph.passes.contract import Level, Pass, PassContext, PassResult
from moegraph.passes.registry import registry
from moegraph.specs.schema import Spec

_mg = torch.ops.moegraph
_QUANTISERS = frozenset({_mg.mx_quantize_rows.default, _mg.fp8_quantize_rows.default, _mg.fp8_quantize_blocks.default})


@registry.register
@dataclass(frozen=True)
class PrepareWeights(Pass):
    """Moves the quantisation of weights into a graph of its own."""

    name: ClassVar[str] = "prepare-weights"
    level: ClassVar[Level] = "step"
    requires: ClassVar[frozenset[str]] = frozenset({"split"})

    @classmethod
    def from_spec(cls, spec: Spec) -> PrepareWeights | None:
        return cls() if spec.precision.fp8 != "off" or spec.precision.mxfp8.parts else None

    def apply(self, unit: Unit, context: PassContext) -> PassResult:
        prepare = _Prepare()
        graphs = {name: _lift(module, prepare, self.name) for name, module in unit.graphs.items()}
        if not prepare.results:
            return PassResult(unit, note="no weight is quantised in this block")
        return PassResult(unit.with_graphs({**graphs, "prepare": prepare.module()}), list(prepare.results))


@dataclass
class _Prepare:
    """The graph that is being put together: nodes by their name and by what they compute, and its results by the name
    they have as inputs."""

    graph: fx.Graph = field(default_factory=fx.Graph)
    made: dict[str, fx.Node] = field(default_factory=dict)
    known: dict[Any, fx.Node] = field(default_factory=dict)
    inputs: list[Port] = field(default_factory=list)
    results: dict[str, fx.Node] = field(default_factory=dict)

    def copy(self, node: fx.Node, given: dict[fx.Node, Port]) -> fx.Node:
        """A node of a step graph, and what it depends on, in this graph."""
        name = display_name(node)
        if name not in self.made:
            if node in given:
                last = self.graph.find_nodes(op="placeholder")[-1:]
                with self.graph.inserting_after(last[0]) if last else self.graph.inserting_before():
                    new = self.graph.placeholder(identifier(name))
                self.inputs.append(given[node])
            else:
                args: Any = fx.map_arg(node.args, lambda n: self.copy(n, given))
                key = (node.target, args, tuple(sorted(node.kwargs.items())))
                if key in self.known:
                    self.made[name] = self.known[key]
                    return self.known[key]
                new = self.known[key] = self.graph.create_node(node.op, node.target, args, node.kwargs, name=node.name)
            new.meta = {**node.meta, "custom": copy.deepcopy(facts(node))}
            self.made[name] = new
        return self.made[name]

    def result(self, node: fx.Node, given: dict[fx.Node, Port]) -> str:
        """The name of the result of this graph that a node of a step graph computes."""
        new = self.copy(node, given)
        name = next((name for name, known in self.results.items() if known is new), display_name(node))
        self.results[name] = new
        return name

    def module(self) -> fx.GraphModule:
        """The finished graph."""
        result = self.graph.output(tuple(self.results.values()))
        result.meta["val"] = tuple(node.meta["val"] for node in self.results.values())
        facts(result).update(name="output")
        self.graph.lint()
        module = deferred_graph_module({}, self.graph, "Prepare")
        module.meta["inputs"] = tuple(self.inputs)
        module.meta["outputs"] = tuple(Port("prepared", name) for name in self.results)
        return module


def _lift(module: fx.GraphModule, prepare: _Prepare, made_by: str) -> fx.GraphModule:
    """A step graph whose quantised weights are inputs; what makes them goes to `prepare`."""
    rewriter = Rewriter(module, made_by)
    given = dict(zip(rewriter.graph.find_nodes(op="placeholder"), ports(rewriter.module, "inputs"), strict=True))
    weights = {node: port for node, port in given.items() if port.role == "parameter"}
    of_weights = set(weights)
    for node in rewriter.graph.nodes:  # in order, so that arguments come first
        if node.op == "call_function" and node.all_input_nodes and of_weights.issuperset(node.all_input_nodes):
            of_weights.add(node)
    lifted = [node for node in of_weights if node.target is operator.getitem and node.args[0].target in _QUANTISERS]
    if not lifted:
        return module
    inputs: dict[str, fx.Node] = {}
    order = {node: place for place, node in enumerate(rewriter.graph.nodes)}
    for node in sorted(lifted, key=order.__getitem__):
        name = prepare.result(node, weights)
        if name in inputs:
            rewriter.replace(node, inputs[name])
            continue
        last = rewriter.graph.find_nodes(op="placeholder")[-1]
        with rewriter.graph.inserting_after(last):
            new = inputs[name] = rewriter.graph.placeholder(identifier(f"prepared.{name}"))
        new.meta = {**node.meta, "custom": {**copy.deepcopy(facts(node)), "name": f"prepared.{name}"}}
        given[new] = Port("prepared", name)
        rewriter.replace(node, new)
    eliminate_dead_code(rewriter.graph)
    for node, port in list(given.items()):
        if port.role == "parameter" and not node.users:
            rewriter.graph.erase_node(node)
            del given[node]
    rewriter.module.meta["inputs"] = tuple(given[node] for node in rewriter.graph.find_nodes(op="placeholder"))
    return rewriter.finish()
