"""The canonical text of a graph: one node per line, the same on every machine.

    name: dtype[shape] = operator(arguments)  # the pass that made it

No object ids, addresses, devices or process groups. `graph_json` says the same for machines.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from moegraph.graph.names import display_name, facts, target_name
from moegraph.graph.program import ports

_SHORT_DTYPES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float8_e4m3fn: "f8e4m3",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
}


def value_text(value: Any) -> str:
    """dtype and shape of a node's value, tuples in parentheses."""
    if isinstance(value, torch.Tensor):
        return f"{_SHORT_DTYPES.get(value.dtype, str(value.dtype))}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(value_text, value))})"
    return type(value).__name__


def _argument_text(argument: Any) -> str:
    if isinstance(argument, fx.Node):
        return display_name(argument)
    if isinstance(argument, (tuple, list)):
        inner = ", ".join(map(_argument_text, argument))
        return f"[{inner}]" if isinstance(argument, list) else f"({inner}{',' if len(argument) == 1 else ''})"
    if isinstance(argument, torch.dtype):
        return _SHORT_DTYPES.get(argument, str(argument))
    if isinstance(argument, torch.device):
        return "device"
    return repr(argument)


def operation_text(node: fx.Node) -> str:
    """What a node does: its operator and arguments, `input` or `parameter`."""
    if node.op == "placeholder":
        return "input"
    if node.op == "get_attr":
        return "parameter"
    arguments = [_argument_text(a) for a in node.args]
    arguments += [f"{k}={_argument_text(v)}" for k, v in node.kwargs.items()]
    if target_name(node) == "getitem":
        return f"{arguments[0]}[{arguments[1]}]"
    return f"{target_name(node)}({', '.join(arguments)})"


def node_text(node: fx.Node, module: fx.GraphModule) -> str:
    """One line for one node."""
    if node.op == "output":
        results: Iterable[fx.Node] = node.args[0]  # type: ignore[assignment]
        named = zip(ports(module, "outputs"), results, strict=True)
        return "return " + ", ".join(f"{port.role} {port.name} = {_argument_text(value)}" for port, value in named)
    made_by = facts(node).get("made_by", "?")
    return f"{display_name(node)}: {value_text(node.meta.get('val'))} = {operation_text(node)}  # {made_by}"


def graph_text(module: fx.GraphModule) -> str:
    """The canonical text of a graph, one line per node, without a trailing newline."""
    return "\n".join(node_text(node, module) for node in module.graph.nodes)


def graph_json(module: fx.GraphModule) -> dict[str, Any]:
    """The canonical graph as JSON-able data: ports, and per node its name, operator, arguments, value and facts."""
    nodes = [
        {
            "name": display_name(node),
            "op": node.op,
            "target": target_name(node),
            "args": [_argument_text(a) for a in node.args] if node.op != "output" else [],
            "kwargs": {k: _argument_text(v) for k, v in node.kwargs.items()},
            "inputs": [display_name(n) for n in node.all_input_nodes],
            "value": value_text(node.meta.get("val")),
            "facts": {k: v for k, v in facts(node).items() if k != "name"},
        }
        for node in module.graph.nodes
    ]
    return {
        "inputs": [list(port) for port in ports(module, "inputs")],
        "outputs": [list(port) for port in ports(module, "outputs")],
        "nodes": nodes,
    }


def text_hash(text: str) -> str:
    """SHA-256 of a text, in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()
