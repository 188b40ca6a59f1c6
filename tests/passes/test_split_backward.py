"""split-backward: however it is run, the cut graphs give what the joint graph gives, and each does only its part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from moegraph import ops
from moegraph.graph.build import GraphBuilder
from moegraph.graph.names import display_name
from moegraph.graph.program import Parameter, Port, ports
from moegraph.graph.text import graph_text
from moegraph.passes.split_backward import cut
from moegraph.step.joint import trace_joint
from moegraph.verify.run import deterministic_threads, run_graph
from tests.everyday import everyday
from tests.step.kinds import CASES, compiled_case, inputs_of, joint_record

PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}


def of_roles(values: Mapping[Port, Tensor], *roles: str) -> dict[Port, Tensor]:
    return {port: value for port, value in values.items() if port.role in roles}


def assert_same(found: Mapping[Port, Tensor], expected: Mapping[Port, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert not [port for port in expected if not torch.equal(found[port], expected[port])]


@pytest.mark.parametrize("case", everyday(CASES, first=1))
def test_the_cut_graphs_together_are_the_joint_graph(case: str) -> None:
    before, after = joint_record(case).program, compiled_case(case).program
    with deterministic_threads():
        for kind, unit in after.units.items():
            inputs = inputs_of(after, unit)
            expected = run_graph(before.units[kind].graphs["joint"], inputs).results
            gradients = of_roles(expected, "grad", "grad_input")
            outputs = {port: value for port, value in expected.items() if port not in gradients}

            forward = run_graph(unit.graphs["forward"], inputs).results
            saved = of_roles(forward, "saved")
            assert_same({p: v for p, v in forward.items() if p not in saved}, outputs)
            assert_same(run_graph(unit.graphs["evaluate"], inputs).results, outputs)
            assert_same(run_graph(unit.graphs["backward"], {**inputs, **saved}).results, gradients)

            early = run_graph(unit.graphs["backward_input"], {**inputs, **saved}).results
            live = of_roles(early, "live")
            late = run_graph(unit.graphs["backward_weight"], {**inputs, **saved, **live}).results
            assert_same({**of_roles(early, "grad_input"), **late}, gradients)


@pytest.mark.parametrize("case", everyday(CASES, first=1))
def test_neither_parameters_nor_block_inputs_are_saved(case: str) -> None:
    for unit in compiled_case(case).program.units.values():
        (result,) = unit.graphs["forward"].graph.find_nodes(op="output")
        results = dict(zip(ports(unit.graphs["forward"], "outputs"), result.args[0], strict=True))
        for port, node in results.items():
            assert port.role != "saved" or node.op == "call_function", (unit.kind, port)
        assert not [port for port in ports(unit.graphs["evaluate"], "outputs") if port.role == "saved"]


@pytest.mark.parametrize("case", everyday(CASES, first=1))
def test_every_saved_value_is_read_in_backward_and_every_live_one_afterwards(case: str) -> None:
    for unit in compiled_case(case).program.units.values():
        declared = {name: set(ports(module, "inputs")) for name, module in unit.graphs.items()}
        produced = {name: set(ports(module, "outputs")) for name, module in unit.graphs.items()}
        saved = {port for port in produced["forward"] if port.role == "saved"}
        assert saved == {port for port in declared["backward"] if port.role == "saved"}
        live = {port for port in produced["backward_input"] if port.role == "live"}
        assert live == {port for port in declared["backward_weight"] if port.role == "live"}


@pytest.mark.parametrize("case", everyday(CASES, first=1))
def test_backward_input_holds_nothing_that_only_a_weight_gradient_needs(case: str) -> None:
    for unit in compiled_case(case).program.units.values():
        graph = unit.graphs["backward_input"].graph
        assert not [node for node in graph.nodes if node.target in ops.WEIGHT_GRADIENTS]
        needed = ancestors_of(unit.graphs["backward_input"], "grad_input")
        idle = [n for n in graph.nodes if n.target in PRODUCTS and n not in needed]
        assert not idle, (unit.kind, [display_name(node) for node in idle])


def ancestors_of(module: fx.GraphModule, role: str) -> set[fx.Node]:
    (result,) = module.graph.find_nodes(op="output")
    stack = [node for port, node in zip(ports(module, "outputs"), result.args[0], strict=True) if port.role == role]
    found: set[fx.Node] = set()
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return found


def test_backward_weight_holds_the_weight_gradients_of_the_experts() -> None:
    graph = compiled_case("plain").program.units["moe"].graphs["backward_weight"].graph
    assert sum(node.target is torch.ops.moegraph.grouped_mm_wgrad_add.default for node in graph.nodes) == 2
    assert not [node for node in graph.nodes if node.target is torch.ops.moegraph.grouped_mm_dgrad.default]


def test_the_embedding_has_no_input_gradient_and_all_its_work_is_put_off() -> None:
    graphs = compiled_case("plain").program.units["embedding"].graphs
    assert ports(graphs["backward_input"], "outputs") == ()
    assert ports(graphs["backward_weight"], "outputs") == (Port("added", "weight"),)


def block(body: Any) -> fx.GraphModule:
    """The joint graph of a block whose hidden output `body(builder, hidden)` returns."""
    builder = GraphBuilder("test")
    hidden = builder.input("hidden", (3, 4), torch.float64)
    builder.output("hidden", "hidden", body(builder, hidden))
    return trace_joint(builder.finish("block"))


def test_a_block_without_parameters_is_cut_into_graphs_without_weight_work() -> None:
    graphs = cut(block(lambda builder, hidden: builder.call("gate", ops.sigmoid, hidden)))
    assert ports(graphs["backward_weight"], "outputs") == ports(graphs["backward_weight"], "inputs") == ()
    assert ports(graphs["backward_input"], "outputs") == (Port("grad_input", "hidden"),)


def test_a_block_that_returns_its_input_is_cut_too() -> None:
    graphs = cut(block(lambda builder, hidden: hidden))
    inputs = {Port("input", "hidden"): torch.randn(3, 4), Port("tangent", "hidden"): torch.randn(3, 4)}
    assert torch.equal(
        run_graph(graphs["evaluate"], inputs).results[Port("hidden", "hidden")], inputs[Port("input", "hidden")]
    )
    found = run_graph(graphs["backward_input"], inputs).results
    assert torch.equal(found[Port("grad_input", "hidden")], inputs[Port("tangent", "hidden")])


def test_a_gradient_that_another_gradient_needs_is_handed_on_and_not_computed_twice() -> None:
    """The bias gets the tangent's sum; the weight gradient is one product, and it stands in one of the halves."""

    def body(builder: GraphBuilder, hidden: fx.Node) -> fx.Node:
        weight = builder.parameter(Parameter("w", (4, 4), "matrix", "normal", 0.1, dtype=torch.float64))
        bias = builder.parameter(Parameter("b", (4,), "bias", "zeros", dtype=torch.float64))
        return builder.call("product", ops.linear, hidden, weight, bias)

    graphs = cut(block(body))
    products = {name: sum(n.target in PRODUCTS for n in module.graph.nodes) for name, module in graphs.items()}
    assert products == {"forward": 1, "backward_input": 1, "backward_weight": 1, "backward": 2, "evaluate": 1}


def test_cutting_twice_gives_the_same_texts() -> None:
    joint = joint_record("plain").program.units["moe"].graphs["joint"]
    first, second = cut(joint), cut(joint)
    assert {n: graph_text(m) for n, m in first.items()} == {n: graph_text(m) for n, m in second.items()}
