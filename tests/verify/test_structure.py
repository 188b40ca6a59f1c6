"""Every structural verifier finds the fault it is for, alone and in the pipeline, and names pass, kind and node."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives  # registers the fake kernels of the collectives
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from moegraph import ops
from moegraph.errors import CheckFailed
from moegraph.graph.edit import Rewriter, clone
from moegraph.graph.effects import lost_effects
from moegraph.graph.program import Port, Unit
from moegraph.graph.propagate import propagate
from moegraph.passes.pipeline import TRACE, run_pipeline
from moegraph.verify.structure import (
    VERIFIERS,
    check_graph,
    check_rewrite,
    check_unit,
    collective_order,
)
from tests.passes.user_passes import pass_class
from tests.step.kinds import CASES, compiled_case

aten = torch.ops.aten
Plant = Callable[[Rewriter], object]


@torch.library.custom_op("moegraph_test::add_into", mutates_args=("x",))
def add_into(x: Tensor) -> Tensor:
    return x.add_(1.0).clone()


@add_into.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def layer() -> fx.GraphModule:
    return compiled_case("plain").record("balance-losses").program.units["moe"].graphs["layer"]


def joint() -> fx.GraphModule:
    return compiled_case("plain").record(TRACE).program.units["moe"].graphs["joint"]


def recorded(
    rewriter: Rewriter, target: Any, *args: Any, name: str = "planted", like: fx.Node | None = None
) -> fx.Node:
    """A node that claims to give what `like` gives; its operator is not evaluated."""
    with rewriter.graph.inserting_before(rewriter.output_node()):
        node = rewriter.graph.call_function(target, args)
    source = like or next(n for n in rewriter.graph.nodes if n.op == "placeholder")
    node.meta["val"] = source.meta["val"]
    layer_name = next(n.meta["custom"]["name"] for n in rewriter.graph.nodes if n.op == "placeholder")
    node.meta["custom"] = {"name": name, "made_by": "mine", "layer": layer_name, "direction": "forward"}
    rewriter.rewritten.append(name)
    return node


def hidden(rewriter: Rewriter) -> fx.Node:
    return next(n for n in rewriter.graph.nodes if n.op == "placeholder" and n.meta["val"].is_floating_point())


def unbacked(rewriter: Rewriter) -> None:
    node = recorded(rewriter, aten.sigmoid.default, hidden(rewriter))
    environment = ShapeEnv()
    with FakeTensorMode(shape_env=environment):
        node.meta["val"] = torch.empty(environment.create_unbacked_symint())


def on_the_host(rewriter: Rewriter) -> None:
    node = recorded(rewriter, aten.sym_size.int, hidden(rewriter), 0)
    node.meta["val"] = 4


class ProcessGroup:
    """Stands for torch.distributed's, which cannot be made without a process group."""

    def __repr__(self) -> str:
        return "group"


def without(fact: str) -> Plant:
    def plant(rewriter: Rewriter) -> None:
        del recorded(rewriter, aten.sigmoid.default, hidden(rewriter)).meta["custom"][fact]

    return plant


def more_ports(side: str, *ports: Port) -> Plant:
    def plant(rewriter: Rewriter) -> None:
        rewriter.module.meta[side] = (*rewriter.module.meta[side], *ports)
        rewriter.rewritten.append("output")

    return plant


def call(target: Any, *more: Any) -> Plant:
    return lambda rewriter: recorded(rewriter, target, hidden(rewriter), *more)


def masked_index(rewriter: Rewriter) -> None:
    mask = recorded(rewriter, aten.gt.Scalar, hidden(rewriter), 0, name="mask")
    mask.meta["val"] = mask.meta["val"] > 0
    recorded(rewriter, aten.index.Tensor, hidden(rewriter), [mask])


ANYWHERE: dict[str, tuple[str, str, Plant]] = {
    "item": ("no host synchronisation", "planted = aten._local_scalar_dense", call(aten._local_scalar_dense.default)),
    "nonzero": ("no host synchronisation", "planted = aten.nonzero makes the host wait", call(aten.nonzero.default)),
    "torch.nonzero": ("no host synchronisation", "planted = nonzero makes the host wait", call(torch.nonzero)),
    "masked_select": ("no host synchronisation", "planted = aten.masked_select", call(aten.masked_select.default)),
    "unique": ("no host synchronisation", "planted = aten._unique2", call(aten._unique2.default)),
    "equal": ("no host synchronisation", "planted = aten.equal", call(aten.equal.default)),
    "index by a mask": ("no host synchronisation", "planted = aten.index.Tensor makes", masked_index),
    "unbacked size": ("no host synchronisation", "planted has the shape (u0,), which depends on values", unbacked),
    "number on the host": ("no host synchronisation", "gives a int on the host", on_the_host),
    "add_": ("no mutation", "planted = aten.add_.Tensor writes to its argument", call(aten.add_.Tensor, 1.0)),
    "torch.relu_": ("no mutation", "planted = relu_ writes to its argument", call(torch.relu_)),
    "custom mutation": (
        "no mutation",
        "planted = moegraph_test.add_into writes",
        call(torch.ops.moegraph_test.add_into.default),
    ),
    "+=": ("no mutation", "planted = iadd writes to its argument", call(operator.iadd, 1.0)),
    "unknown collective": (
        "known collectives",
        "planted = _c10d_functional.all_reduce_coalesced is a communicating operator that no check knows",
        call(torch.ops._c10d_functional.all_reduce_coalesced.default, "sum", "0"),
    ),
    "symmetric memory": (
        "known collectives",
        "planted = symm_mem.one_shot_all_reduce is a communicating",
        call(torch.ops.symm_mem.one_shot_all_reduce.default, "sum", "0"),
    ),
    "cuda": (
        "no baked device or rank",
        "planted is tied to device cuda:1",
        call(aten.to.device, torch.device("cuda:1")),
    ),
    "cuda by name": ("no baked device or rank", "planted is tied to device cuda", call(torch.Tensor.to, "cuda")),
    "process group": ("no baked device or rank", "has a ProcessGroup written", call(torch.sigmoid, ProcessGroup())),
    "constant": ("no baked device or rank", "has a Tensor written into", call(torch.add, torch.ones(1))),
    "no maker": ("named origin", "planted does not say which pass made it", without("made_by")),
    "an output too many": (
        "declared inputs and outputs",
        "declares",
        more_ports("outputs", Port("metric", "absent")),
    ),
    "an input too many": ("declared inputs and outputs", "declares", more_ports("inputs", Port("input", "absent"))),
}


@pytest.mark.parametrize("graph", [layer, joint], ids=["layer", "joint"])
@pytest.mark.parametrize("fault", ANYWHERE)
def test_a_planted_fault_is_found_and_named(fault: str, graph: Callable[[], fx.GraphModule]) -> None:
    verifier, message, plant = ANYWHERE[fault]
    assert check_graph(graph()) == []
    rewriter = Rewriter(graph(), "mine")
    plant(rewriter)
    problems = check_graph(rewriter.module)
    assert any(each.startswith(f"{verifier}: ") and message in each for each in problems), problems
    assert {each.split(":")[0] for each in problems} == {verifier}


@pytest.mark.parametrize("level", ["layer", "step"])
@pytest.mark.parametrize("fault", ANYWHERE)
def test_the_pipeline_stops_at_the_pass_that_planted_it(fault: str, level: str) -> None:
    verifier, message, plant = ANYWHERE[fault]
    program = compiled_case("plain").record("lower").program
    mine = pass_class("mine", level, lambda rewriter, unit, context: plant(rewriter))()
    with pytest.raises(CheckFailed) as caught:
        run_pipeline(program.with_units({"head": program.units["head"]}), [mine])
    text = str(caught.value)
    assert text.startswith(f"after mine: head/{'layer' if level == 'layer' else 'joint'}:\n")
    assert f"{verifier}: " in text
    assert message in text
    assert caught.value.exit_code == 3


def test_a_step_node_without_a_layer_node_is_found() -> None:
    rewriter = Rewriter(joint(), "mine")
    without("layer")(rewriter)
    assert check_graph(rewriter.module) == ["named origin: planted does not say which layer node it comes from"]


def test_a_step_node_that_names_a_layer_node_that_is_not_there_is_found() -> None:
    unit = compiled_case("plain").record(TRACE).program.units["moe"]
    rewriter = Rewriter(unit.graphs["joint"], "mine")
    recorded(rewriter, aten.sigmoid.default, hidden(rewriter)).meta["custom"]["layer"] = "moe.nowhere"
    with pytest.raises(CheckFailed, match=r"planted says it comes from moe.nowhere"):
        check_unit(unit.with_graphs({"joint": rewriter.finish()}), "mine")


def test_a_constant_read_by_a_step_graph_is_found() -> None:
    module = clone(joint())
    module.register_buffer("table", torch.ones(3))
    with module.graph.inserting_before(next(iter(module.graph.nodes))):
        node = module.graph.get_attr("table")
    node.meta["custom"] = {"name": "table", "made_by": "mine", "layer": "hidden"}
    assert check_graph(module) == ["no baked device or rank: table is a constant tensor in a step graph"]


def test_a_parameter_that_does_not_reach_the_loss_is_found() -> None:
    rewriter = Rewriter(layer(), "mine")
    (rows,) = (n for n in rewriter.graph.nodes if n.target is ops.scale_rows)
    rows.replace_all_uses_with(rows.args[0])  # the router's weights are thrown away; it still chooses the experts
    auxiliary = [port for port in rewriter.module.meta["outputs"] if port.role == "auxiliary"]
    result = rewriter.output_node()
    result.args = (result.args[0][: -len(auxiliary)],)  # type: ignore[index]
    rewriter.module.meta["outputs"] = rewriter.module.meta["outputs"][: -len(auxiliary)]
    assert check_graph(rewriter.module) == [
        "parameters reach the loss: parameter moe.router.weight does not reach the loss: it would never be trained"
    ]


def test_a_gradient_that_depends_on_no_tangent_is_found() -> None:
    rewriter = Rewriter(joint(), "mine")
    result = rewriter.output_node()
    parameter = next(n for n in rewriter.graph.nodes if n.meta["custom"]["name"] == "moe.w_up")
    zeros = recorded(rewriter, aten.zeros_like.default, parameter, like=parameter)
    index = rewriter.module.meta["outputs"].index(Port("grad", "moe.w_up"))
    values = list(result.args[0])  # type: ignore[arg-type]
    values[index] = zeros
    result.args = (tuple(values),)
    problem = "parameters reach the loss: the gradient of moe.w_up depends on no tangent: it would never be trained"
    assert check_graph(rewriter.module) == [problem]


def test_an_output_declared_twice_is_found() -> None:
    rewriter = Rewriter(layer(), "mine")
    outputs = rewriter.module.meta["outputs"]
    rewriter.module.meta["outputs"] = (outputs[0], outputs[0], *outputs[2:])
    expected = f"declared inputs and outputs: {outputs[0].role} {outputs[0].name} is declared twice among the outputs"
    assert check_graph(rewriter.module) == [expected]


def test_a_graph_without_declared_ports_is_refused() -> None:
    module = clone(layer())
    del module.meta["outputs"]
    with pytest.raises(CheckFailed, match="after mine: moe/layer: the graph declares no inputs and outputs"):
        check_unit(Unit("moe", {"layer": module}), "mine")


@pytest.mark.parametrize("case", CASES)
def test_every_graph_of_every_case_holds(case: str) -> None:
    for record in compiled_case(case).records:
        for unit in record.program.units.values():
            assert not [problem for module in unit.graphs.values() for problem in check_graph(module)]


def test_each_verifier_has_a_planted_fault() -> None:
    elsewhere = {"parameters reach the loss", "operands with their scales"}  # the second: test_operands.py
    assert {verifier for verifier, _, _ in ANYWHERE.values()} | elsewhere == set(VERIFIERS)


# --- propagation ---------------------------------------------------------------------------------------------------


def writes_inside(x: Tensor) -> Tensor:
    """A Python function whose name does not say that it writes to its argument."""
    x.add_(1.0)
    return x.clone()


def test_a_function_that_writes_to_its_argument_inside_is_found() -> None:
    rewriter = Rewriter(layer(), "mine")
    recorded(rewriter, writes_inside, hidden(rewriter))
    with pytest.raises(CheckFailed, match="after mine: node planted = writes_inside writes to its argument"):
        propagate(rewriter.finish(), "mine")


def test_a_wrong_recorded_shape_is_found_at_the_node() -> None:
    module = clone(layer())
    node = next(n for n in module.graph.nodes if n.target is ops.swiglu)
    node.meta["val"] = node.meta["val"][:3]
    with pytest.raises(
        CheckFailed, match=r"after mine: node moe.act gives f64\[32, 16\], but f64\[3, 16\] is recorded"
    ):
        propagate(module, "mine")


@pytest.mark.parametrize("where", ["placeholder", "call_function", "output"])
def test_a_node_without_a_recorded_value_is_found(where: str) -> None:
    module = clone(layer())
    node = next(n for n in module.graph.nodes if n.op == where)
    del node.meta["val"]
    with pytest.raises(CheckFailed, match="has no recorded value"):
        propagate(module, "mine")


def test_a_method_call_is_not_a_node_of_ours() -> None:
    rewriter = Rewriter(layer(), "mine")
    source = hidden(rewriter)
    with rewriter.graph.inserting_before(rewriter.output_node()):
        node = rewriter.graph.call_method("item", (source,))
    node.meta = {"val": source.meta["val"], "custom": {"name": "planted", "made_by": "mine"}}
    assert check_graph(rewriter.module) == [
        "no host synchronisation: planted = item makes the host wait for the device"
    ]
    with pytest.raises(CheckFailed, match=r"node planted \(call_method\)"):
        propagate(rewriter.module, "mine")


# --- before and after ----------------------------------------------------------------------------------------------


def with_collectives(names: tuple[str, ...]) -> fx.GraphModule:
    rewriter = Rewriter(layer(), "mine")
    for name in names:
        source = next(n for n in rewriter.graph.nodes if n.op == "placeholder")
        recorded(rewriter, torch.ops._c10d_functional.all_reduce.default, source, "sum", name, name=f"reduce.{name}")
    return rewriter.finish()


def test_a36_a_lost_collective_is_found() -> None:
    before, after = with_collectives(("0", "1")), with_collectives(("1",))
    assert check_graph(before) == []
    assert lost_effects([before], [after]) == ["reduce.0"]
    unit = compiled_case("plain").record("lower").program.units["moe"]
    with pytest.raises(CheckFailed, match=r"after mine: moe: reduce\.0 has an effect and was removed"):
        check_rewrite(unit.with_graphs({"layer": before}), unit.with_graphs({"layer": after}), "mine")


def test_the_order_of_collectives_is_that_of_the_graph() -> None:
    assert collective_order(with_collectives(("ep", "dp"))) == [
        ("_c10d_functional.all_reduce", "ep"),
        ("_c10d_functional.all_reduce", "dp"),
    ]
    assert collective_order(layer()) == []


def test_a_pass_may_not_rename_a_kind() -> None:
    unit = compiled_case("plain").record("lower").program.units["moe"]
    with pytest.raises(CheckFailed, match="moe came back as other"):
        check_rewrite(unit, replace(unit, kind="other"), "mine")
