"""split-backward: the joint graph is cut into the graphs that a schedule runs.

    joint(params, inputs, tangents) -> outputs, grad_input, grads
      =>  forward(params, inputs)                    -> outputs, saved
          backward_input(params, inputs, saved, tangents)  -> grad_input, live
          backward_weight(inputs, saved, tangents, live)   -> grads
          backward(params, inputs, saved, tangents)  -> grad_input, grads      (both at once)
          evaluate(params, inputs)                   -> outputs               (saves nothing)

`backward_input` holds what the gradient of the block's input needs, `backward_weight` only what the weight gradients
need beyond that, so a schedule can run it later. Parameters and block inputs are never among the saved values: they
are passed again. Each graph takes just the inputs it reads. A view or widening cast of a kept value is made again in
backward rather than kept.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from moegraph._torch_compat import deferred_graph_module
from moegraph.graph.edit import clone
from moegraph.graph.effects import is_accumulation, is_effectful
from moegraph.graph.names import display_name, facts, identifier
from moegraph.graph.program import Port, Unit, ports, results
from moegraph.passes.contract import Level, Pass, PassContext, PassResult
from moegraph.passes.registry import registry
from moegraph.specs.schema import Spec

aten = torch.ops.aten
_VIEWS = frozenset(
    {
        aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.t.default, aten.transpose.int,
        aten.permute.default, aten.expand.default, aten.unsqueeze.default, aten.squeeze.dim, aten.slice.Tensor,
        aten.select.int,
    }
)  # fmt: skip


@registry.register
@dataclass(frozen=True)
class SplitBackward(Pass):
    """Cuts the joint graph into forward, backward_input, backward_weight, backward and evaluate."""

    name: ClassVar[str] = "split-backward"
    level: ClassVar[Level] = "step"
    requires: ClassVar[frozenset[str]] = frozenset({"joint"})
    provides: ClassVar[frozenset[str]] = frozenset({"split"})
    removes: ClassVar[frozenset[str]] = frozenset({"joint"})

    @classmethod
    def from_spec(cls, spec: Spec) -> SplitBackward:
        return cls()

    def apply(self, unit: Unit, context: PassContext) -> PassResult:
        graphs = cut(unit.graphs["joint"])
        return PassResult(unit.with_graphs(graphs), list(graphs))


def cut(joint: fx.GraphModule) -> dict[str, fx.GraphModule]:
    """The five step graphs of a joint graph."""
    joint = clone(joint)
    inputs = dict(zip(joint.graph.find_nodes(op="placeholder"), ports(joint, "inputs"), strict=True))
    outputs = list(zip(ports(joint, "outputs"), results(joint), strict=True))
    given = {node for node, port in inputs.items() if port.role != "tangent"}
    plain = [(port, node) for port, node in outputs if port.role not in ("grad_input", "grad", "added")]
    grad_input = [(port, node) for port, node in outputs if port.role == "grad_input"]
    grads = [(port, node) for port, node in outputs if port.role in ("grad", "added")]
    # What has an effect runs whether its result is used or not: once, in forward or in the first half of backward. What
    # adds a gradient to its buffer is the gradient.
    calls = [node for node in joint.graph.nodes if node.op == "call_function"]
    effects = [node for node in calls if is_effectful(node) and not is_accumulation(node)]
    first = [node for node in effects if facts(node).get("direction") == "forward"]
    then = [node for node in effects if facts(node).get("direction") != "forward"]

    forward = _closure([*(node for _, node in plain), *first])
    wanted = _closure([*(node for _, node in grad_input + grads), *then])
    forward |= _with_items(_forward_only(joint, inputs) & wanted)
    outside = wanted - forward
    saved, remade = _saved(joint, forward, outside, given)
    saved_ports = [(Port("saved", display_name(node)), node) for node in saved]

    early = _with_items(_closure([*(node for _, node in grad_input), *then])) - forward - remade
    late = outside - early
    live = [n for n in joint.graph.nodes if n in early and _is_computed(n) and any(u in late for u in n.users)]
    live += [node for node in dict.fromkeys(n for _, n in grads) if node in early and node not in live]
    live_ports = [(Port("live", display_name(node)), node) for node in live]

    def extract(
        name: str,
        results: Sequence[tuple[Port, fx.Node]],
        handed: Sequence[tuple[Port, fx.Node]] = (),
        effects: Sequence[fx.Node] = (),
    ) -> fx.GraphModule:
        return _extract(joint, name, inputs, results, handed, effects)

    return {
        "forward": extract("forward", [*plain, *saved_ports], effects=first),
        "backward_input": extract("backward_input", [*grad_input, *live_ports], saved_ports, then),
        "backward_weight": extract("backward_weight", grads, [*saved_ports, *live_ports]),
        "backward": extract("backward", [*grad_input, *grads], saved_ports, then),
        "evaluate": extract("evaluate", plain, effects=first),
    }


def _is_computed(node: fx.Node) -> bool:
    """Whether the node computes a tensor, rather than being handed one or making a tuple of them."""
    return node.op != "placeholder" and isinstance(node.meta.get("val"), torch.Tensor)


def _closure(roots: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes these depend on, themselves included."""
    found: set[fx.Node] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return found


def _with_items(nodes: set[fx.Node]) -> set[fx.Node]:
    """These nodes and, where one makes a tuple, whatever is taken out of it: a tuple is never handed from graph to
    graph."""
    tuples = [node for node in nodes if isinstance(node.meta.get("val"), (tuple, list))]
    return nodes.union(user for node in tuples for user in node.users if user.target is operator.getitem)


def _forward_only(joint: fx.GraphModule, inputs: dict[fx.Node, Port]) -> set[fx.Node]:
    """Forward nodes that are not duplicates made for backward and depend on no tangent."""
    return {
        node
        for node in joint.graph.nodes
        if facts(node).get("direction") == "forward" and inputs.get(node, Port("input", "")).role != "tangent"
    }


def _saved(
    joint: fx.GraphModule, forward: set[fx.Node], outside: set[fx.Node], given: set[fx.Node]
) -> tuple[list[fx.Node], set[fx.Node]]:
    """Forward values to keep, in graph order, and the views and casts of kept values that backward makes again."""
    wanted = {n for n in forward - given if any(user in outside for user in n.users)}
    remade: set[fx.Node] = set()
    kept: set[fx.Node] = set()
    stack = list(wanted)
    while stack:
        node = stack.pop()
        if node in given or node in kept or node in remade:
            continue
        if _free_to_remake(node):
            remade.add(node)
            stack.extend(node.all_input_nodes)
        else:
            kept.add(node)
    return [n for n in joint.graph.nodes if n in kept], remade


def _free_to_remake(node: fx.Node) -> bool:
    """Views, casts to a wider dtype, and taken-apart results never need a copy of their own."""
    if node.target in _VIEWS:
        return True
    if node.target is aten._to_copy.default:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        return bool(node.meta["val"].element_size() >= source.meta["val"].element_size())
    return False


def _extract(
    joint: fx.GraphModule,
    name: str,
    inputs: dict[fx.Node, Port],
    results: Sequence[tuple[Port, fx.Node]],
    handed: Sequence[tuple[Port, fx.Node]],
    effects: Sequence[fx.Node],
) -> fx.GraphModule:
    """The part of the joint graph that computes `results` and `effects`; `handed` values are inputs of it instead of
    being computed."""
    stop = {node: port for port, node in handed}
    needed: set[fx.Node] = set()
    stack = [*(node for _, node in results), *effects]
    while stack:
        node = stack.pop()
        if node in needed:
            continue
        needed.add(node)
        if node not in stop:
            stack.extend(node.all_input_nodes)
    graph, env, declared = fx.Graph(), {}, []
    for node in joint.graph.nodes:
        port = inputs.get(node)
        if node in needed and port is not None:
            env[node] = _placeholder(graph, node, display_name(node))
            declared.append(port)
    for port, node in handed:
        if node in needed and node not in env:
            env[node] = _placeholder(graph, node, f"{port.role}.{display_name(node)}")
            declared.append(port)
    for node in joint.graph.nodes:
        if node in needed and node not in env and node.op != "output":
            new = graph.create_node(
                node.op,
                node.target,
                fx.map_arg(node.args, lambda n: env[n]),
                fx.map_arg(node.kwargs, lambda n: env[n]),
                name=node.name,
            )
            new.meta = {**node.meta, "custom": copy.deepcopy(facts(node))}
            env[node] = new
    result = graph.output(tuple(env[node] for _, node in results))
    result.meta["val"] = tuple(node.meta["val"] for _, node in results)
    facts(result).update(name="output")
    graph.lint()
    module = deferred_graph_module(joint, graph, "".join(part.title() for part in name.split("_")))
    module.meta["inputs"], module.meta["outputs"] = tuple(declared), tuple(port for port, _ in results)
    return module


def _placeholder(graph: fx.Graph, node: fx.Node, name: str) -> fx.Node:
    new = graph.placeholder(identifier(name))
    new.meta = {**node.meta, "custom": {**facts(node), "name": name}}
    return new
