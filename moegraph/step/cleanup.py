"""What tracing leaves behind is removed, and what remains is named: the last act of joint tracing.

Detaches and aliases go (no autograd runs in a step graph), dead code goes, and each node is called after its layer
node and operator: `moe.up`'s product is `moe.up/mm`, its backward nodes `moe.up/grad.…`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx

from moegraph._torch_compat import deferred_graph_module
from moegraph.graph.effects import eliminate_dead_code
from moegraph.graph.names import facts, identifier, unique_name
from moegraph.graph.program import Port

aten = torch.ops.aten
_IDENTITIES = (aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default)


def clean_joint(
    traced: fx.GraphModule,
    inputs: Sequence[Port],
    outputs: Sequence[Port],
    credits: Mapping[str, tuple[str, str]],
) -> fx.GraphModule:
    """A fresh graph module without the traces of tracing; `credits` maps a traced node to (layer node, direction)."""
    old = traced.graph
    for node in old.nodes:
        if node.target in _IDENTITIES:
            node.replace_all_uses_with(node.args[0])
    eliminate_dead_code(old)
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    taken: set[str] = set()
    input_ports = iter(inputs)
    for node in old.nodes:
        if node.op == "placeholder":
            port = next(input_ports)
            name = port.name if port.role != "tangent" else f"tangent.{port.name}"
            layer, direction = name, "backward" if port.role == "tangent" else "forward"
        elif node.op == "output":
            name, layer, direction = "output", "output", "backward"
        else:
            layer, direction = credits.get(node.name, ("", "forward"))
            name = f"{layer}/{'grad.' if direction == 'backward' else ''}{_short(node)}"
        name = unique_name(name, taken)
        new = graph.create_node(
            node.op,
            identifier(name) if node.op == "placeholder" else node.target,
            fx.map_arg(node.args, lambda n: env[n]),
            fx.map_arg(node.kwargs, lambda n: env[n]),
            name=identifier(name),
        )
        if "val" in node.meta:
            new.meta["val"] = node.meta["val"]
        facts(new).update(name=name, layer=layer, direction=direction, made_by="trace")
        env[node] = new
    result = next(iter(graph.find_nodes(op="output")))
    result.meta["val"] = tuple(node.meta["val"] for node in result.args[0])
    graph.lint()
    root = {node.target: getattr(traced, node.target) for node in graph.find_nodes(op="get_attr")}
    module = deferred_graph_module(root, graph, "Joint")
    module.meta["inputs"] = tuple(inputs)
    module.meta["outputs"] = tuple(outputs)
    return module


def _short(node: fx.Node) -> str:
    target = node.target
    if node.op == "get_attr":
        return "constant"
    packet = getattr(target, "overloadpacket", None)
    return str(packet).rsplit(".", 1)[-1] if packet is not None else getattr(target, "__name__", str(target))
