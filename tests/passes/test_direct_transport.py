"""dispatch-experts with transport `direct`: what the graph holds, and that no later pass or clean-up takes it apart."""

from __future__ import annotations

import pytest
from torch import fx

from moegraph import ops
from moegraph.compiled import compile
from moegraph.graph.effects import eliminate_dead_code, is_communication
from moegraph.graph.names import display_name
from moegraph.graph.program import Port, ports
from moegraph.specs.schema import Spec
from moegraph.verify.structure import collective_order, known_communication
from tests.parallel.steps import layout_spec

FORWARD = ["moegraph.direct_dispatch.default", "moegraph.direct_return.default"]
BACKWARD = ["moegraph.direct_put.default", "moegraph.direct_take.default"]


def spec_of(*overrides: str, overflow: str = "replay") -> Spec:
    return layout_spec(*overrides, dp=2, ep=2, transport="direct", capacity=2.0, overflow=overflow)


def calls(module: fx.GraphModule, target: object) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.target is target]


@pytest.fixture(scope="module")
def graphs() -> dict[str, fx.GraphModule]:
    unit = compile(spec_of()).program.units["moe"]
    return {**unit.graphs, "layer": unit.layer_graph}


def test_rows_go_out_and_home_in_one_node_each_and_only_counts_are_a_collective(
    graphs: dict[str, fx.GraphModule],
) -> None:
    layer = graphs["layer"]
    assert not calls(layer, ops.combine)
    assert not calls(layer, ops.gather_weights)
    (start,) = calls(layer, ops.all_to_all_start)
    assert tuple(start.meta["val"].shape) == (2, 5)  # the counts of 4 experts and a rank number, from each rank
    (dispatch,), (back,) = calls(layer, ops.direct_dispatch), calls(layer, ops.direct_return)
    assert dispatch.args[-1] == back.args[-1] == "ep"
    assert Port("metric", "overflow") in ports(layer, "outputs")


def test_the_router_weights_are_dispatched_from_where_the_router_left_them(graphs: dict[str, fx.GraphModule]) -> None:
    (dispatch,) = calls(graphs["layer"], ops.direct_dispatch)
    assert [display_name(node) for node in dispatch.args[:2]] == ["moe.norm", "moe.weights"]  # type: ignore[arg-type]


def test_each_step_graph_talks_once_each_way_and_backward_repeats_nothing(graphs: dict[str, fx.GraphModule]) -> None:
    for name, expected in (("forward", FORWARD), ("evaluate", FORWARD), ("backward", BACKWARD)):
        order = [operator for operator, _ in collective_order(graphs[name])]
        assert [f"{each}.default" for each in order if "direct" in each] == expected, name
        assert {group for _, group in collective_order(graphs[name]) if group == "ep"} == {"ep"}
    full = compile(spec_of("passes.recompute.policy=full")).program.units["moe.recompute_full"].graphs["backward"]
    assert [f"{each}.default" for each, _ in collective_order(full) if "direct" in each] == BACKWARD


def test_an_exchange_whose_result_nobody_needs_is_kept(graphs: dict[str, fx.GraphModule]) -> None:
    graph = fx.Graph()
    graph.graph_copy(graphs["forward"].graph, {})
    graph.output(())
    eliminate_dead_code(graph)
    kept = [str(node.target) for node in graph.nodes if is_communication(node)]
    assert [each for each in kept if "direct" in each] == FORWARD
    assert list(known_communication(fx.GraphModule({}, graph))) == []


def test_fused_experts_take_the_rows_where_they_arrived() -> None:
    layer = compile(spec_of("passes.fuse-experts.enabled=true")).program.units["moe"].layer_graph
    (fused,), (dispatch,) = calls(layer, ops.expert_ffn), calls(layer, ops.direct_dispatch)
    assert fused.args[0].args == (dispatch, 0)  # type: ignore[union-attr]
    assert not calls(layer, ops.permute)
    (back,) = calls(layer, ops.direct_return)
    assert back.args[0].args == (fused, 0)  # type: ignore[union-attr]


def test_dropped_choices_are_counted_instead_of_overflow() -> None:
    names = {port.name for port in ports(compile(spec_of(overflow="drop")).program.units["moe"].layer_graph, "outputs")}
    assert "dropped" in names
    assert "overflow" not in names
