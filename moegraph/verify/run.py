"""Running a unit's graphs eagerly on given inputs, whatever stage of the pipeline they are at, and recording values.

The result maps what can be compared across passes: every block output and every gradient, by role and name; the
recording maps node names to values, in the order they were computed. In a thread that is a rank of a simulated world
(`moegraph.verify.world`) collectives go through its peers.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from moegraph.errors import CheckFailed
from moegraph.graph.effects import is_communication
from moegraph.graph.names import display_name, target_name
from moegraph.graph.program import Port, Unit, ports
from moegraph.step.joint import Differentiator, joint_signature
from moegraph.verify.world import Rank, rank_of_thread

STEP_GRAPHS = ("forward", "backward", "backward_input", "backward_weight", "evaluate")  # in the order they run here
_CHOICE = torch.ops.moegraph.choose_experts.default
_C10D = torch.ops._c10d_functional


@dataclass
class Execution:
    """Outputs and gradients by port, each node's value by name, and the same results computed another way."""

    results: dict[Port, Tensor]
    values: dict[str, Any] = field(default_factory=dict)
    again: dict[Port, Tensor] = field(default_factory=dict)


def execute(unit: Unit, inputs: Mapping[Port, Tensor], choices: Mapping[str, Any] | None = None) -> Execution:
    """Runs a unit: its layer graph with autograd, its joint graph, or its step graphs one after the other.

    Tangents missing from `inputs` are zeros, so an output that a pass added changes no gradient. In a joint graph,
    experts are chosen as `choices` has it, if given: the recorded values of another execution.
    """
    if "forward" in unit.graphs:
        return _execute_split(unit, inputs)
    if "joint" in unit.graphs:
        return run_graph(unit.graphs["joint"], inputs, choices)
    return _execute_layer(unit.graphs["layer"], inputs)


def _execute_layer(layer: fx.GraphModule, inputs: Mapping[Port, Tensor]) -> Execution:
    values: dict[str, Any] = {}
    signature = joint_signature(layer)
    filled = {port: _value(port, layer, inputs) for port in signature.inputs}
    outputs, gradients = _Recording(layer, values)(filled)
    results = dict(zip(ports(layer, "outputs"), outputs, strict=True))
    return Execution({**results, **gradients}, values)


class _Recording(Differentiator):
    """A differentiator that keeps the forward value of every node."""

    def __init__(self, layer: fx.GraphModule, values: dict[str, Any]) -> None:
        super().__init__(layer, _say_where)
        self.recorded = values

    def _forward(self, inputs: dict[Port, Tensor]) -> tuple[dict[fx.Node, Any], list[Any], set[fx.Node]]:
        found = super()._forward(inputs)
        self.recorded.update({display_name(node): value for node, value in found[0].items()})
        return found


@contextmanager
def _say_where(node: fx.Node, direction: str) -> Iterator[None]:
    """Tells the simulated rank of this thread, if there is one, at which node it is."""
    rank = rank_of_thread()
    if rank is not None:
        name = display_name(node)
        rank.at(name if direction == "forward" else f"{name}/grad", target_name(node))
    yield


def _value(port: Port, layer: fx.GraphModule, inputs: Mapping[Port, Tensor]) -> Tensor:
    if port in inputs or port.role != "tangent":
        return inputs[port]
    result = next(iter(layer.graph.find_nodes(op="output")))
    index = [p.name for p in ports(layer, "outputs")].index(port.name)
    fake: Tensor = result.meta["val"][index]
    return torch.zeros(tuple(fake.shape), dtype=fake.dtype)


def run_graph(
    module: fx.GraphModule, inputs: Mapping[Port, Tensor], choices: Mapping[str, Any] | None = None
) -> Execution:
    """Runs one step graph node by node; its choices of experts are those of `choices`, by name, if given."""
    values: dict[fx.Node, Any] = {}
    recorded: dict[str, Any] = {}
    given = iter(ports(module, "inputs"))
    results: dict[Port, Tensor] = {}
    buffers: dict[str, Tensor] = {}
    rank = rank_of_thread()
    with torch.no_grad():
        for node in module.graph.nodes:
            if node.op == "placeholder":
                port = next(given)
                if port.role == "gradient_buffer":  # what it holds does not matter while nothing says: keep it
                    values[node] = buffers[port.name] = torch.full_like(_empty(node), torch.nan)
                else:
                    values[node] = inputs[port] if port in inputs else torch.zeros_like(_empty(node))
            elif node.op == "output":
                nodes: Any = node.args[0]
                results = {port: values[n] for port, n in zip(ports(module, "outputs"), nodes, strict=True)}
                results = _from_buffers(results, buffers, dict(zip(results, nodes, strict=True)))
            else:
                args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: values[n])
                chosen = choices is not None and node.target is _CHOICE
                values[node] = choices[display_name(node)] if chosen else _call(node, args, kwargs, rank)  # type: ignore[index]
                if node.target is not operator.getitem:
                    recorded[display_name(node)] = values[node]
    return Execution(results, recorded)


def _from_buffers(
    results: Mapping[Port, Tensor], buffers: Mapping[str, Tensor], made_by: Mapping[Port, fx.Node]
) -> dict[Port, Tensor]:
    """Results with every gradient that went to a buffer, in the dtype of what was added there."""
    found: dict[Port, Tensor] = {}
    for port, value in results.items():
        if port.role == "added":
            operand: Any = made_by[port].args[2]
            dtype = operand.meta["val"].dtype
            dtype = dtype if dtype.is_floating_point else torch.bfloat16  # what a payload is decoded to
            found[Port("grad", port.name)] = buffers[port.name].to(dtype)
        else:
            found[port] = value
    return found


def _call(node: fx.Node, args: Any, kwargs: Any, rank: Rank | None) -> Any:
    """What a node's operator answers; in a simulated rank its collectives go through the peers."""
    target: Any = node.target
    if rank is None or not is_communication(node):
        return target(*args, **kwargs)
    rank.at(display_name(node), target_name(node))
    if target is _C10D.all_to_all_single.default:
        return rank.all_to_all(*args, **kwargs)
    if target is _C10D.wait_tensor.default:
        return args[0].clone()
    if target_name(node).startswith("moegraph."):  # these look for the peers of their thread themselves
        return target(*args, **kwargs)
    raise CheckFailed(f"{display_name(node)} = {target_name(node)} cannot be simulated: verify knows all-to-all only")


def _empty(node: fx.Node) -> Tensor:
    fake: Tensor = node.meta["val"]
    return torch.empty(tuple(fake.shape), dtype=fake.dtype)


def _execute_split(unit: Unit, inputs: Mapping[Port, Tensor]) -> Execution:
    """Forward, then the joined backward; and, as `again`, the split backward and evaluate."""
    if "prepare" in unit.graphs:
        inputs = {**inputs, **run_graph(unit.graphs["prepare"], inputs).results}
    forward = run_graph(unit.graphs["forward"], inputs)
    outputs = {port: value for port, value in forward.results.items() if port.role != "saved"}
    saved = {port: value for port, value in forward.results.items() if port.role == "saved"}
    backward = run_graph(unit.graphs["backward"], {**inputs, **saved})
    early = run_graph(unit.graphs["backward_input"], {**inputs, **saved})
    live = {port: value for port, value in early.results.items() if port.role == "live"}
    late = run_graph(unit.graphs["backward_weight"], {**inputs, **saved, **live})
    evaluate = run_graph(unit.graphs["evaluate"], inputs)
    values = {**forward.values, **backward.values}
    again = {**{p: v for p, v in early.results.items() if p.role != "live"}, **late.results, **evaluate.results}
    return Execution({**outputs, **backward.results}, values, again)


@contextmanager
def deterministic_threads() -> Iterator[None]:
    """One thread, so that a sum is added up in one order in every graph."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
