"""canonicalize: what does nothing goes, what has an effect stays, and not a bit of any number moves."""

from __future__ import annotations

import pytest
import torch
import torch.distributed._functional_collectives  # registers the fake kernels of the collectives
from torch import Tensor, fx

from moegraph import ops
from moegraph.graph import effects
from moegraph.graph.build import GraphBuilder
from moegraph.graph.effects import lost_effects, register_effectful
from moegraph.graph.program import Port, Unit
from moegraph.passes.canonicalize import Canonicalize
from moegraph.passes.split_backward import cut
from moegraph.step.joint import trace_joint
from moegraph.verify.compare import compare
from moegraph.verify.run import execute
from tests.passes.hand_built import F64, TOKENS, WIDTH, context, names, unit_of, weight
from tests.step.kinds import compiled_case


@torch.library.custom_op("moegraph_test::announce", mutates_args=())
def announce(x: Tensor) -> Tensor:
    return x.clone()


@announce.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("moegraph_test::write_zero", mutates_args=("x",))
def write_zero(x: Tensor) -> None:
    x.zero_()


ANNOUNCE = torch.ops.moegraph_test.announce.default
WRITE_ZERO = torch.ops.moegraph_test.write_zero.default
ALL_REDUCE = torch.ops._c10d_functional.all_reduce.default
WAIT = torch.ops._c10d_functional.wait_tensor.default


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(effects, "_registered", set())


def canonical(unit: Unit) -> Unit:
    return Canonicalize().apply(unit, context()).unit


def test_dead_code_goes_with_everything_only_it_needed() -> None:
    def body(builder: GraphBuilder, hidden: fx.Node) -> fx.Node:
        unused = builder.call("unused", ops.sigmoid, hidden)
        builder.call("also_unused", ops.add, unused, hidden)
        return builder.call("used", ops.sigmoid, hidden)

    result = Canonicalize().apply(unit_of(body), context())
    assert names(result.unit) == ["used"]
    assert set(result.rewritten) == {"unused", "also_unused"}


def test_a_multiplication_by_one_goes_and_any_other_stays() -> None:
    def body(builder: GraphBuilder, hidden: fx.Node) -> fx.Node:
        one = builder.call("one", ops.scale, hidden, 1.0)
        return builder.call("two", ops.scale, one, 2.0)

    assert names(canonical(unit_of(body))) == ["two"]


def test_equal_nodes_without_gradients_become_one() -> None:
    layer = compiled_case("plain").record("lower").program.units["moe"]
    builder = GraphBuilder("lower")
    documents = builder.input("document_ids", (1, TOKENS), torch.int32)
    hidden = builder.input("hidden", (TOKENS, WIDTH), F64)
    masks = [builder.call(f"mask{i}", ops.token_mask, documents) for i in range(3)]
    for index, mask in enumerate(masks):
        builder.output("metric", f"counts{index}", mask)
    builder.output("hidden", "hidden", hidden)
    result = canonical(Unit("block", {"layer": builder.finish("block")}))
    assert names(result) == ["mask0"]
    assert canonical(layer) is layer  # lowering repeats nothing


@pytest.mark.parametrize("shared", [False, True])
def test_not_a_bit_of_any_gradient_moves(shared: bool) -> None:
    """Repeated calls that carry gradients, and no-ops whose operand has other users, are where one could move."""

    def body(builder: GraphBuilder, hidden: fx.Node) -> fx.Node:
        first = builder.call("first", ops.linear, hidden, weight(builder), None)
        second = builder.call("second", ops.linear, hidden, weight(builder), None)
        total = builder.call("total", ops.add, builder.call("squashed", ops.sigmoid, first), second)
        same = builder.call("same", ops.scale, hidden, 1.0)
        for index in range(4 if shared else 0):
            total = builder.call(f"more{index}", ops.add, total, same if index % 2 else hidden, alpha=0.3 + index / 7)
        return builder.call("out", ops.add, total, builder.call("last", ops.sigmoid, same))

    unit = unit_of(body)
    generator = torch.Generator().manual_seed(1)
    inputs = {
        port: torch.randn(shape, generator=generator, dtype=F64)
        for port, shape in (
            (Port("parameter", "w"), (WIDTH, WIDTH)),
            (Port("input", "hidden"), (TOKENS, WIDTH)),
            (Port("tangent", "hidden"), (TOKENS, WIDTH)),
        )
    }
    difference = compare(execute(unit, inputs), execute(canonical(unit), inputs), 0.0)
    assert difference.outputs == difference.gradients == 0.0
    assert {"first", "second"} <= set(names(canonical(unit)))


def test_random_nodes_are_never_merged() -> None:
    def body(builder: GraphBuilder, hidden: fx.Node) -> fx.Node:
        noise = [builder.call(f"noise{i}", torch.ops.aten.rand_like.default, hidden) for i in range(2)]
        return builder.call("sum", ops.add, *noise)

    assert names(canonical(unit_of(body))) == ["noise0", "noise1", "sum"]


def test_a36_an_effectful_operator_survives_once_registered() -> None:
    def body(builder: GraphBuilder, hidden: fx.Node) -> fx.Node:
        for index in range(2):
            builder.call(f"send{index}", ANNOUNCE, hidden)
        return builder.call("out", ops.sigmoid, hidden)

    assert names(canonical(unit_of(body))) == ["out"]
    register_effectful("moegraph_test::announce")
    assert names(canonical(unit_of(body))) == ["send0", "send1", "out"]  # neither removed nor merged


def test_a36_collectives_whose_result_nobody_here_reads_survive() -> None:
    def body(builder: GraphBuilder, hidden: fx.Node) -> fx.Node:
        started = builder.call("reduce", ALL_REDUCE, hidden, "sum", "0")
        builder.call("reduced", WAIT, started)
        return builder.call("out", ops.sigmoid, hidden)

    assert names(canonical(unit_of(body))) == ["reduce", "reduced", "out"]


def test_mutation_survives() -> None:
    def body(builder: GraphBuilder, hidden: fx.Node) -> fx.Node:
        builder.call("zero", WRITE_ZERO, hidden)
        return builder.call("out", ops.sigmoid, hidden)

    # An operator that returns nothing has no value to record; the builder keeps None.
    assert names(canonical(unit_of(body))) == ["zero", "out"]


def test_a36_effects_survive_tracing_and_the_cut_each_exactly_once_a_step() -> None:
    register_effectful("moegraph_test::announce")
    builder = GraphBuilder("lower")
    places = builder.input("positions", (1, TOKENS), torch.int32)
    hidden = builder.input("hidden", (TOKENS, WIDTH), F64)
    builder.call("send", ANNOUNCE, places)
    builder.call("reduce", ALL_REDUCE, places, "sum", "0")
    builder.output("hidden", "hidden", builder.call("out", ops.linear, hidden, weight(builder), None))
    joint = trace_joint(builder.finish("block"))
    graphs = cut(joint)
    assert lost_effects([joint], graphs.values()) == []
    for target in (ANNOUNCE, ALL_REDUCE):
        holding = {name for name, module in graphs.items() if any(n.target is target for n in module.graph.nodes)}
        assert holding == {"forward", "evaluate"}
