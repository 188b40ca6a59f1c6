"""Joint tracing: a layer graph becomes one aten graph of its forward and its backward.

    for each layer node, in order:           evaluate it on detached leaves      (direction "forward")
    for each layer node, in reverse order:   gradients of its leaves from those of its results ("backward")

Every layer node is differentiated on its own, by its operator's registered formula; sums of gradients are explicit
nodes. So each node of the joint graph knows the layer node it belongs to, and the order of every addition is fixed.
Traced on CPU fake tensors on any machine: the text of a step graph does not depend on where it will run.

Inputs of the joint graph: parameters, buffers, block inputs, then one tangent per differentiable output. Outputs: the
block's outputs, the gradient of its hidden input if it has one, then the gradient of each trained parameter.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from moegraph._torch_compat import FakeTensorMode, traced_graph
from moegraph.graph.names import display_name
from moegraph.graph.program import Port, ports, results
from moegraph.step.cleanup import clean_joint

DIFFERENTIABLE = ("hidden", "loss", "auxiliary")


@dataclass
class JointSignature:
    """The ports of a block's joint computation."""

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]


def joint_signature(layer: fx.GraphModule) -> JointSignature:
    """The ports of the joint graph of a layer graph."""
    parameters = layer.meta["parameters"]
    inputs = [Port("parameter", n) for n, p in parameters.items() if p.trained]
    inputs += [Port("buffer", n) for n, p in parameters.items() if not p.trained]
    inputs += list(ports(layer, "inputs"))
    outputs = list(ports(layer, "outputs"))
    inputs += [Port("tangent", port.name) for port in outputs if port.role in DIFFERENTIABLE]
    outputs += [Port("grad_input", port.name) for port in inputs if port == Port("input", "hidden")]
    outputs += [Port("grad", port.name) for port in inputs if port.role == "parameter"]
    return JointSignature(tuple(inputs), tuple(outputs))


@dataclass
class _Evaluated:
    """A layer node that ran: its leaves that need gradients (node → detached tensor) and its results."""

    node: fx.Node
    leaves: dict[fx.Node, Tensor]
    results: list[tuple[fx.Node | None, Tensor]] = field(default_factory=list)


Mark = Callable[[fx.Node, str], Any]


class Differentiator:
    """Evaluates a layer graph and its gradients node by node. Works on real tensors and under `make_fx` alike.

    `mark(node, direction)` is a context manager entered around the work done for one layer node.
    """

    def __init__(self, layer: fx.GraphModule, mark: Mark | None = None) -> None:
        self.layer = layer
        self.mark = mark or _no_mark
        self._same = _first_of_equals(layer)

    def __call__(self, inputs: dict[Port, Tensor]) -> tuple[list[Tensor], dict[Port, Tensor]]:
        """Block outputs in port order, and gradients by their ports."""
        values, evaluated, needs_grad = self._forward(inputs)
        nodes = results(self.layer)
        gradients = self._backward(inputs, nodes, evaluated, needs_grad, values)
        return [values[node] for node in nodes], gradients

    def _forward(self, inputs: dict[Port, Tensor]) -> tuple[dict[fx.Node, Any], list[_Evaluated], set[fx.Node]]:
        values: dict[fx.Node, Any] = {}
        needs_grad: set[fx.Node] = set()
        evaluated: list[_Evaluated] = []
        layer_inputs = iter(ports(self.layer, "inputs"))
        parameters = self.layer.meta["parameters"]
        for node in self.layer.graph.nodes:
            if node.op == "placeholder":
                port = next(layer_inputs)
                values[node] = inputs[port]
                if port.name == "hidden":
                    needs_grad.add(node)
            elif node.op == "get_attr":
                trained = parameters[node.target].trained
                values[node] = inputs[Port("parameter" if trained else "buffer", node.target)]
                if trained:
                    needs_grad.add(node)
            elif node.op == "call_function" and node.target is operator.getitem:
                values[node] = values[node.args[0]][node.args[1]]
            elif node.op == "call_function":
                evaluated.append(self._evaluate(node, values, needs_grad))
        return values, evaluated, needs_grad

    def _evaluate(self, node: fx.Node, values: dict[fx.Node, Any], needs_grad: set[fx.Node]) -> _Evaluated:
        record = _Evaluated(node, {})

        def leaf(argument: fx.Node) -> Any:
            argument = self._same.get(argument, argument)
            if argument not in needs_grad:
                return values[argument]
            if argument not in record.leaves:
                record.leaves[argument] = values[argument].detach().requires_grad_()
            return record.leaves[argument]

        with self.mark(node, "forward"), torch.enable_grad():
            args, kwargs = fx.map_arg((node.args, node.kwargs), leaf)
            out = node.target(*args, **kwargs)  # type: ignore[operator]
        if isinstance(out, Tensor):
            record.results = [(node, out)]
            values[node] = out.detach()
            if out.requires_grad:
                needs_grad.add(node)
            return record
        taken = [self._same.get(user, user) for user in node.users if user.target is operator.getitem]
        items = {_index(user, len(out)): user for user in taken}
        record.results = [(items.get(index), item) for index, item in enumerate(out)]
        values[node] = tuple(item.detach() for item in out)
        needs_grad.update(user for user, item in record.results if user is not None and item.requires_grad)
        return record

    def _backward(
        self,
        inputs: dict[Port, Tensor],
        outputs: Sequence[fx.Node],
        evaluated: list[_Evaluated],
        needs_grad: set[fx.Node],
        values: dict[fx.Node, Any],
    ) -> dict[Port, Tensor]:
        pending: dict[fx.Node, list[Tensor]] = defaultdict(list)
        for port, node in zip(ports(self.layer, "outputs"), outputs, strict=True):
            if port.role in DIFFERENTIABLE:
                pending[self._same.get(node, node)].append(inputs[Port("tangent", port.name)])
        for record in reversed(evaluated):
            if not record.leaves:
                continue
            with self.mark(record.node, "backward"):
                arrived = [
                    (out, _sum(pending.pop(user)))
                    for user, out in record.results
                    if user is not None and out.requires_grad and pending.get(user)
                ]
                if not arrived:
                    continue
                leaves = list(record.leaves.items())
                found = torch.autograd.grad(
                    [out for out, _ in arrived], [x for _, x in leaves], [g for _, g in arrived], allow_unused=True
                )
            for (argument, _), gradient in zip(leaves, found, strict=True):
                if gradient is not None:
                    pending[argument].append(gradient)
        return self._collect(pending, values)

    def _collect(self, pending: dict[fx.Node, list[Tensor]], values: dict[fx.Node, Any]) -> dict[Port, Tensor]:
        gradients: dict[Port, Tensor] = {}
        layer_inputs = iter(ports(self.layer, "inputs"))
        parameters = self.layer.meta["parameters"]
        for node in self.layer.graph.nodes:
            if node.op == "placeholder":
                if next(layer_inputs).name == "hidden":
                    gradients[Port("grad_input", "hidden")] = self._total(node, pending, values)
            elif node.op == "get_attr" and node not in self._same and parameters[node.target].trained:
                gradients[Port("grad", node.target)] = self._total(node, pending, values)
        return gradients

    def _total(self, node: fx.Node, pending: dict[fx.Node, list[Tensor]], values: dict[fx.Node, Any]) -> Tensor:
        with self.mark(node, "backward"):
            return _sum(pending[node]) if pending.get(node) else torch.zeros_like(values[node])


def _index(item: fx.Node, length: int) -> int:
    """Which of a tuple's results a node takes."""
    index: Any = item.args[1]
    return int(index) % length


def _first_of_equals(layer: fx.GraphModule) -> dict[fx.Node, fx.Node]:
    """Reads of one parameter, and takings of one result, are one value however many nodes say so: maps each but the
    first to the first, so that their gradients are added up."""
    first: dict[Any, fx.Node] = {}
    same: dict[fx.Node, fx.Node] = {}
    for node in layer.graph.nodes:
        if node.op == "get_attr":
            key: Any = node.target
        elif node.op == "call_function" and node.target is operator.getitem:
            source: Any = node.args[0]
            key = (source, _index(node, len(source.meta["val"])))
        else:
            continue
        if first.setdefault(key, node) is not node:
            same[node] = first[key]
    return same


def _sum(terms: list[Tensor]) -> Tensor:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


@contextmanager
def _no_mark(node: fx.Node, direction: str) -> Iterator[None]:
    yield


def trace_joint(layer: fx.GraphModule) -> fx.GraphModule:
    """The joint graph of a layer graph, functional aten, on fake CPU tensors, cleaned and named."""
    signature = joint_signature(layer)
    fake_mode = FakeTensorMode()
    example = _fake_inputs(layer, signature, fake_mode)
    credits: dict[str, tuple[str, str]] = {}

    @contextmanager
    def mark(node: fx.Node, direction: str) -> Iterator[None]:
        graph = traced_graph()
        before = len(graph.nodes)
        yield
        grown = len(graph.nodes) - before
        for new, _ in zip(reversed(graph.nodes), range(grown), strict=False):
            credits[new.name] = (display_name(node), direction)

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        inputs = dict(zip(signature.inputs, tensors, strict=True))
        outputs, gradients = Differentiator(layer, mark)(inputs)
        return (*outputs, *(gradients[port] for port in signature.outputs[len(outputs) :]))

    with fake_mode:
        traced = make_fx(run, tracing_mode="real")(*example)
    return clean_joint(traced, signature.inputs, signature.outputs, credits)


def _fake_inputs(layer: fx.GraphModule, signature: JointSignature, fake_mode: FakeTensorMode) -> list[Tensor]:
    """One fake tensor per joint input."""
    known = input_values(layer)
    with fake_mode:
        return [torch.empty(tuple(known[port].shape), dtype=known[port].dtype) for port in signature.inputs]


def input_values(layer: fx.GraphModule) -> dict[Port, Tensor]:
    """The recorded (fake) value of each joint input of a layer graph; a tangent is like its output."""
    known: dict[Port, Tensor] = {}
    layer_inputs = iter(ports(layer, "inputs"))
    for node in layer.graph.nodes:
        if node.op == "placeholder":
            known[next(layer_inputs)] = node.meta["val"]
        elif node.op == "get_attr":
            known[Port("parameter", node.target)] = known[Port("buffer", node.target)] = node.meta["val"]
        elif node.op == "output":
            for port, value in zip(ports(layer, "outputs"), node.meta["val"], strict=True):
                known[Port("tangent", port.name)] = value
    return known
