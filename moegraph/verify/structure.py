"""Structural verifiers: what must be true of every graph after every pass, whatever the numbers.

Each verifier is a function from a graph to sentences about what is wrong, each naming the node. They run after every
pass (`check_unit`), with what must hold between before and after (`check_rewrite`), and each has a test that plants the
fault it is for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import Tensor, fx

from moegraph.errors import CheckFailed
from moegraph.graph.effects import is_accumulation, is_communication, is_mutating, lost_effects
from moegraph.graph.names import display_name, facts, target_name
from moegraph.graph.program import Port, Unit, ports, results
from moegraph.graph.propagate import Propagator
from moegraph.graph.text import value_text
from moegraph.ops import COMMUNICATION

Verifier = Callable[[fx.GraphModule], Iterator[str]]

_HOST_SYNC = frozenset(
    {
        "_local_scalar_dense", "item", "tolist", "numpy", "is_nonzero", "nonzero", "nonzero_numpy", "argwhere",
        "masked_select", "bincount", "repeat_interleave", "unique", "_unique", "_unique2", "unique_dim",
        "unique_consecutive", "equal", "allclose", "histc",
    }
)  # fmt: skip
_KNOWN_COMMUNICATION = frozenset(
    {
        "all_to_all_single", "all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "wait_tensor",
        "broadcast", "exact_exchange", "direct_dispatch", "direct_take", "direct_return", "direct_put",
    }
)  # fmt: skip
_PLAIN = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    slice,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
_DEVICE = re.compile(r"(cuda|xpu|mps|hip|hpu|mtia|xla|npu|meta)(:\d+)?")


def no_host_sync(module: fx.GraphModule) -> Iterator[str]:
    """No operator makes the host wait for a value, no value lives on the host, and no shape depends on one."""
    for node in module.graph.nodes:
        name = f"{display_name(node)} = {target_name(node)}"
        if _base(node) in _HOST_SYNC or _indexes_by_mask(node):
            yield f"{name} makes the host wait for the device"
        for value in _leaves(node.meta.get("val")):
            if not isinstance(value, Tensor):
                if node.op == "call_function" and value is not None:
                    yield f"{name} gives a {type(value).__name__} on the host, not a tensor"
            elif any(not isinstance(size, int) for size in value.shape):
                yield f"{display_name(node)} has the shape {tuple(value.shape)}, which depends on values"


def _base(node: fx.Node) -> str:
    """The operator's bare name: `nonzero` of `aten.nonzero.default`."""
    packet = getattr(node.target, "overloadpacket", None)
    text = str(packet) if packet is not None else target_name(node)
    return text.rsplit(".", 1)[-1]


def _indexes_by_mask(node: fx.Node) -> bool:
    """Whether the node gathers by a boolean mask, which has as many results as the mask has trues."""
    if node.op != "call_function" or _base(node) not in ("index", "getitem"):
        return False
    indices = _leaves(node.args[1])
    return any(isinstance(i, fx.Node) and getattr(i.meta.get("val"), "dtype", None) == torch.bool for i in indices)


def no_mutation(module: fx.GraphModule) -> Iterator[str]:
    """No operator writes to an argument, but for adding a weight gradient to its buffer, once per buffer."""
    given = zip(module.graph.find_nodes(op="placeholder"), ports(module, "inputs"), strict=False)
    buffers = {node for node, port in given if port.role == "gradient_buffer" and len(node.users) == 1}
    for node in module.graph.nodes:
        if is_mutating(node) and not (is_accumulation(node) and node.args[0] in buffers):
            yield f"{display_name(node)} = {target_name(node)} writes to its argument"


def known_communication(module: fx.GraphModule) -> Iterator[str]:
    """Ranks talk only through the collectives that the order check knows."""
    for node in module.graph.nodes:
        packet = str(getattr(node.target, "overloadpacket", "")).rsplit(".", 1)[-1]
        if is_communication(node) and node.target not in COMMUNICATION and packet not in _KNOWN_COMMUNICATION:
            yield f"{display_name(node)} = {target_name(node)} is a communicating operator that no check knows"


def no_baked_device_or_rank(module: fx.GraphModule) -> Iterator[str]:
    """Nothing but plain values is written into a graph, so that it is the same on every rank: no device but the CPU, no
    process group object, no constant tensor, no object that prints its address."""
    for node in module.graph.nodes:
        for argument in _leaves((node.args, node.kwargs)):
            if isinstance(argument, (torch.device, str)) and _DEVICE.fullmatch(str(argument)):
                yield f"{display_name(node)} is tied to device {argument}"
            elif not isinstance(argument, (fx.Node, *_PLAIN)):
                yield f"{display_name(node)} has a {type(argument).__name__} written into its arguments"
        if node.op == "get_attr":
            declared = module.meta.get("parameters")
            if declared is None:
                yield f"{display_name(node)} is a constant tensor in a step graph"
            elif node.target not in declared:
                yield f"{display_name(node)} is a constant tensor, not a declared parameter"


def declared_ports(module: fx.GraphModule) -> Iterator[str]:
    """Placeholders and results are as many as the declared inputs and outputs, and each is declared once."""
    placeholders = module.graph.find_nodes(op="placeholder")
    for side, found in (("inputs", placeholders), ("outputs", results(module))):
        declared = ports(module, "inputs" if side == "inputs" else "outputs")
        if len(declared) != len(found):
            yield f"the graph declares {len(declared)} {side} but has {len(found)}"
        for port in sorted({port for port in declared if declared.count(port) > 1}):
            yield f"{port.role} {port.name} is declared twice among the {side}"


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
    """Every trained parameter of a layer graph reaches one of its differentiable outputs along values that can carry a
    gradient; in a step graph, every gradient depends on a tangent."""
    parameters = module.meta.get("parameters")
    declared = list(zip(ports(module, "outputs"), results(module), strict=False))
    if parameters is None:
        given = zip(module.graph.find_nodes(op="placeholder"), ports(module, "inputs"), strict=False)
        sources = {node for node, port in given if port.role in ("tangent", "live")}
        for port, node in declared:
            if port.role in ("grad", "added", "grad_input") and sources.isdisjoint(_reached([node], lambda n: True)):
                yield f"the gradient of {port.name} depends on no tangent: it would never be trained"
        return
    roots = [node for port, node in declared if port.role in ("hidden", "loss", "auxiliary")]
    names = {node.target for node in _reached(roots, _is_float) if node.op == "get_attr"}
    for name, parameter in parameters.items():
        if parameter.trained and name not in names:
            yield f"parameter {name} does not reach the loss: it would never be trained"


def _reached(roots: Sequence[fx.Node], through: Callable[[fx.Node], bool]) -> set[fx.Node]:
    """What these nodes depend on along nodes that `through` lets pass."""
    found: set[fx.Node] = set()
    stack = [node for node in roots if through(node)]
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(n for n in node.all_input_nodes if through(n))
    return found


def _is_float(node: fx.Node) -> bool:
    return any(isinstance(v, Tensor) and v.is_floating_point() for v in _leaves(node.meta.get("val")))


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


def check_unit(unit: Unit, made_by: str, unchanged: Collection[str] = (), propagator: Propagator | None = None) -> None:
    """Lints, verifies and propagates every graph of a unit but the `unchanged` ones; raises `CheckFailed` naming the
    pass, the kind and the nodes."""
    propagator = propagator or Propagator()
    layer_names = {display_name(node) for node in unit.layer.graph.nodes} if unit.layer is not None else None
    for name, module in unit.graphs.items():
        if name in unchanged:
            continue
        label = f"{made_by}: {unit.kind}/{name}"
        if not {"inputs", "outputs"} <= module.meta.keys():
            raise CheckFailed(f"after {label}: the graph declares no inputs and outputs (meta of its module)")
        try:
            module.graph.lint()
        except Exception as error:
            raise CheckFailed(f"after {label}: not a valid graph: {error}") from error
        problems = check_graph(module)
        if layer_names is not None:
            problems += _unknown_origins(module, layer_names)
        if problems:
            raise CheckFailed(f"after {label}:\n" + "\n".join(problems))
        propagator.check(module, label)


def _unknown_origins(module: fx.GraphModule, layer_names: Collection[str]) -> list[str]:
    return [
        f"named origin: {display_name(node)} says it comes from {facts(node).get('layer')}, not in the layer graph"
        for node in module.graph.nodes
        if node.op == "call_function" and facts(node).get("layer") not in layer_names
    ]


def check_rewrite(before: Unit, after: Unit, made_by: str) -> None:
    """What must hold between a unit before and after a pass: it is still that kind, no effect is lost, and what other
    blocks and the runtime read is there with the dtype and shape it had. Raises `CheckFailed`."""
    if after.kind != before.kind or not after.graphs:
        raise CheckFailed(f"after {made_by}: {before.kind} came back as {after.kind} with {len(after.graphs)} graphs")
    problems = [
        f"{name} has an effect and was removed" for name in lost_effects(before.graphs.values(), after.graphs.values())
    ]
    for name in before.graphs.keys() & after.graphs.keys():
        was, now = _output_types(before.graphs[name]), _output_types(after.graphs[name])
        for port, text in was.items():
            if port[0] == "grad" and ("added", port[1]) in now:
                continue  # it goes to its buffer
            if port not in now:
                problems.append(f"{name}: output {port[1]} is gone")
            elif now[port] != text:
                problems.append(f"{name}: output {port[1]} was {text} and is {now[port]}")
    if problems:
        raise CheckFailed(f"after {made_by}: {before.kind}: " + "; ".join(problems))


def _output_types(module: fx.GraphModule) -> dict[tuple[str, str], str]:
    """Output → dtype and shape; a metric that became an auxiliary loss is still that output."""
    declared = [Port(*port) for port in module.meta.get("outputs", ())]
    return {
        ("metric" if port.role == "auxiliary" else port.role, port.name): value_text(node.meta.get("val"))
        for port, node in zip(declared, results(module), strict=False)
    }


def collective_order(module: fx.GraphModule) -> list[tuple[str, str]]:
    """The sequence of (operator, process group) that a rank issues; it must be the same on every rank of a group."""
    return [(target_name(node), str(node.args[-1])) for node in module.graph.nodes if is_communication(node)]


def _leaves(value: object) -> Iterator[object]:
    """What is inside nested tuples, lists and dicts."""
    if isinstance(value, dict):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _leaves(item)
    else:
        yield value
