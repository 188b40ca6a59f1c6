"""Joint tracing: the joint graph is torch.autograd through the layer graph, bit for bit, and reads as it should."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from moegraph.graph.effects import is_mutating
from moegraph.graph.names import display_name, facts
from moegraph.graph.program import Port, Unit, ports
from moegraph.graph.text import graph_text
from moegraph.step.joint import DIFFERENTIABLE, joint_signature, trace_joint
from moegraph.verify.run import deterministic_threads, run_graph
from tests.everyday import everyday
from tests.step.kinds import CASES, compiled_case, inputs_of

DEVICES = {"cpu"}


def traced(case: str) -> Iterator[tuple[str, Unit]]:
    """Every kind of a case as it was traced, before any step pass."""
    yield from compiled_case(case).record("trace").program.units.items()


def autograd_through(layer: fx.GraphModule, inputs: dict[Port, Tensor]) -> dict[Port, Tensor]:
    """The layer graph run as a function of leaves, and torch.autograd through the whole of it at once."""
    signature = joint_signature(layer)
    leaves = {
        port: inputs[port].clone().requires_grad_()
        for port in signature.inputs
        if port.role == "parameter" or port == Port("input", "hidden")
    }
    given = {**inputs, **leaves}
    values: dict[fx.Node, Any] = {}
    placeholders = iter(ports(layer, "inputs"))
    results: dict[Port, Tensor] = {}
    for node in layer.graph.nodes:
        if node.op == "placeholder":
            values[node] = given[next(placeholders)]
        elif node.op == "get_attr":
            port = Port("parameter", node.target)
            values[node] = given[port] if port in given else given[Port("buffer", node.target)]
        elif node.op == "output":
            results = dict(zip(ports(layer, "outputs"), (values[n] for n in node.args[0]), strict=True))
        else:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: values[n])
            values[node] = node.target(*args, **kwargs)
    roots = {port: value for port, value in results.items() if port.role in DIFFERENTIABLE and value.requires_grad}
    tangents = [inputs[Port("tangent", port.name)] for port in roots]
    gradients = torch.autograd.grad(list(roots.values()), list(leaves.values()), tangents)
    found = {port: value.detach() for port, value in results.items()}
    for port, gradient in zip(leaves, gradients, strict=True):
        found[Port("grad" if port.role == "parameter" else "grad_input", port.name)] = gradient
    return found


@pytest.mark.parametrize("case", everyday(CASES))
def test_the_joint_graph_is_bitwise_torch_autograd_through_the_layer_graph(case: str) -> None:
    program = compiled_case(case).record("trace").program
    with deterministic_threads():
        for kind, unit in traced(case):
            inputs = inputs_of(program, unit)
            expected = autograd_through(unit.layer_graph, inputs)
            found = run_graph(unit.graphs["joint"], inputs).results
            assert found.keys() == expected.keys()
            different = [port for port in expected if not torch.equal(found[port], expected[port])]
            assert not different, (kind, different)
            assert all(torch.isfinite(value).all() for value in expected.values() if value.is_floating_point())


@pytest.mark.parametrize("case", everyday(CASES))
def test_every_node_is_functional_on_the_cpu_and_names_its_layer_node(case: str) -> None:
    for kind, unit in traced(case):
        layer_names = {display_name(node) for node in unit.layer_graph.graph.nodes}
        names = [display_name(node) for node in unit.graphs["joint"].graph.nodes]
        assert len(set(names)) == len(names), kind
        for node in unit.graphs["joint"].graph.nodes:
            assert node.op in ("placeholder", "call_function", "output"), node
            if node.op != "call_function":
                continue
            assert not is_mutating(node), node
            assert facts(node)["layer"] in layer_names, node
            assert facts(node)["direction"] in ("forward", "backward"), node
            values = node.meta["val"] if isinstance(node.meta["val"], tuple | list) else [node.meta["val"]]
            assert {value.device.type for value in values} == DEVICES
            device = node.kwargs.get("device")
            assert device is None or device == torch.device("cpu")


def test_backward_nodes_come_after_every_forward_node() -> None:
    for _, unit in traced("plain"):
        directions = [facts(n)["direction"] for n in unit.graphs["joint"].graph.nodes if n.op == "call_function"]
        assert directions == sorted(directions, reverse=True)


@pytest.mark.parametrize("case", ["plain", "bf16", "sigmoid, grouped, biased, summed"])
def test_two_traces_of_a_layer_graph_give_the_same_text(case: str) -> None:
    for _, unit in traced(case):
        assert graph_text(trace_joint(unit.layer_graph)) == graph_text(unit.graphs["joint"])


def test_two_processes_compile_a_spec_to_the_same_hashes() -> None:
    script = "import json; from tests.step.kinds import compiled_case; print(json.dumps(compiled_case('plain').hashes))"
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert json.loads(run.stdout) == compiled_case("plain").hashes


def test_a_model_of_one_parameter_block_gives_no_input_gradient_but_its_own() -> None:
    unit = compiled_case("plain").program.units["embedding"]
    assert joint_signature(unit.layer_graph).outputs == (Port("hidden", "hidden"), Port("grad", "weight"))
