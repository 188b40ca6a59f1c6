"""Structural verifiers: what must be true of every graph after every pass, whatever the numbers.

Each verifier is a function from a graph to sentences about what is wrong, each naming the node. They run after every
pass (`check_unit`) and each has a test that plants the fault it is for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, fx

from moegraph.errors import CheckFailed
from moegraph.graph.effects import is_communication, is_mutating
from moegraph.graph.names import display_name, facts, target_name
from moegraph.graph.program import Unit, ports

Verifier = Callable[[fx.GraphModule], Iterator[str]]

_HOST_SYNC = ("_local_scalar_dense", "item", "nonzero", "masked_select", "bincount", "repeat_interleave", "unique", "tolist")
_KNOWN_COMMUNICATION = frozenset(
    {
        "all_to_all_single", "all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "wait_tensor", "broadcast",
    }
)  # fmt: skip


def no_host_sync(module: fx.GraphModule) -> Iterator[str]:
    """No operator makes the host wait for a value, and no shape depends on one."""
    for node in module.graph.nodes:
        base = target_name(node).rsplit(".", 1)[-1] if node.op != "call_method" else str(node.target)
        packet = getattr(node.target, "overloadpacket", None)
        base = str(packet).rsplit(".", 1)[-1] if packet is not None else base
        if base in _HOST_SYNC:
            yield f"{display_name(node)} = {target_name(node)} makes the host wait for the device"
        for value in _tensors(node.meta.get("val")):
            if any(not isinstance(size, int) for size in value.shape):
                yield f"{display_name(node)} has the shape {tuple(value.shape)}, which depends on values"


def no_mutation(module: fx.GraphModule) -> Iterator[str]:
    """No operator writes to an argument (accumulation into a gradient bucket will be the one exception)."""
    for node in module.graph.nodes:
        if is_mutating(node):
            yield f"{display_name(node)} = {target_name(node)} writes to its argument"


def known_communication(module: fx.GraphModule) -> Iterator[str]:
    """Ranks talk only through the collectives that the order check knows."""
    for node in module.graph.nodes:
        packet = str(getattr(node.target, "overloadpacket", "")).rsplit(".", 1)[-1]
        if is_communication(node) and packet not in _KNOWN_COMMUNICATION:
            yield f"{display_name(node)} = {target_name(node)} is a communicating operator that no check knows"


def no_baked_device_or_rank(module: fx.GraphModule) -> Iterator[str]:
    """No CUDA device, process group object or constant tensor is written into a graph: it is the same on every rank."""
    for node in module.graph.nodes:
        for argument in _flat((node.args, node.kwargs)):
            if isinstance(argument, torch.device) and argument.type != "cpu":
                yield f"{display_name(node)} is tied to device {argument}"
            elif isinstance(argument, Tensor) or type(argument).__name__ == "ProcessGroup":
                yield f"{display_name(node)} has a {type(argument).__name__} written into its arguments"
        if node.op == "get_attr" and module.meta.get("parameters") is None:
            yield f"{display_name(node)} is a constant tensor in a step graph"


def declared_ports(module: fx.GraphModule) -> Iterator[str]:
    """Placeholders and results are as many as the declared inputs and outputs."""
    placeholders = module.graph.find_nodes(op="placeholder")
    results: Sequence[fx.Node] = next(iter(module.graph.find_nodes(op="output"))).args[0]  # type: ignore[assignment]
    for side, found in (("inputs", placeholders), ("outputs", results)):
        declared = ports(module, "inputs" if side == "inputs" else "outputs")
        if len(declared) != len(found):
            yield f"the graph declares {len(declared)} {side} but has {len(found)}"


def named_origin(module: fx.GraphModule) -> Iterator[str]:
    """Every node says which pass made it, and every step-graph node which layer node it comes from."""
    step = module.meta.get("parameters") is None
    for node in module.graph.nodes:
        if node.op != "call_function":
            continue
        if "made_by" not in facts(node):
            yield f"{display_name(node)} does not say which pass made it"
        if step and not facts(node).get("layer"):
            yield f"{display_name(node)} does not say which layer node it comes from"


def parameters_reach_outputs(module: fx.GraphModule) -> Iterator[str]:
    """Every trained parameter that a layer graph reads reaches one of its differentiable outputs."""
    parameters = module.meta.get("parameters")
    if parameters is None:
        return
    results: Sequence[fx.Node] = next(iter(module.graph.find_nodes(op="output"))).args[0]  # type: ignore[assignment]
    declared = zip(ports(module, "outputs"), results, strict=True)
    reached: set[fx.Node] = set()
    stack = [node for port, node in declared if port.role in ("hidden", "loss", "auxiliary")]
    while stack:
        node = stack.pop()
        if node not in reached:
            reached.add(node)
            stack.extend(node.all_input_nodes)
    names = {node.target for node in reached if node.op == "get_attr"}
    for name, parameter in parameters.items():
        if parameter.trained and name not in names:
            yield f"parameter {name} does not reach the loss: it would never be trained"


VERIFIERS: dict[str, Verifier] = {
    "no host synchronisation": no_host_sync,
    "no mutation": no_mutation,
    "known collectives": known_communication,
    "no baked device or rank": no_baked_device_or_rank,
    "declared inputs and outputs": declared_ports,
    "named origin": named_origin,
    "parameters reach the loss": parameters_reach_outputs,
}


def check_graph(module: fx.GraphModule) -> list[str]:
    """Every sentence every verifier has about this graph, prefixed with the verifier's name."""
    return [f"{name}: {sentence}" for name, verifier in VERIFIERS.items() for sentence in verifier(module)]


def check_unit(unit: Unit, made_by: str) -> None:
    """Lints and verifies every graph of a unit; raises `CheckFailed` naming the pass, the kind and the nodes."""
    problems: list[str] = []
    for name, module in unit.graphs.items():
        module.graph.lint()
        problems += [f"{unit.kind}/{name}: {sentence}" for sentence in check_graph(module)]
    if problems:
        raise CheckFailed(f"after {made_by}:\n" + "\n".join(problems))


def collective_order(module: fx.GraphModule) -> list[tuple[str, str]]:
    """The sequence of (operator, process group) that a rank issues; it must be the same on every rank of a group."""
    return [
        (target_name(node), str(node.args[-1])) for node in module.graph.nodes if is_communication(node)
    ]


def lost_effects(before: fx.GraphModule, after: fx.GraphModule) -> list[str]:
    """Names of effectful nodes that a pass removed."""
    kept = {display_name(node) for node in after.graph.nodes}
    effectful = [n for n in before.graph.nodes if n.op == "call_function" and (is_communication(n) or is_mutating(n))]
    return [display_name(node) for node in effectful if display_name(node) not in kept]


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def _flat(argument: object) -> Iterator[object]:
    if isinstance(argument, dict):
        for item in argument.values():
            yield from _flat(item)
    elif isinstance(argument, (tuple, list, fx.immutable_collections.immutable_list)):
        for item in argument:
            yield from _flat(item)
    else:
        yield argument
