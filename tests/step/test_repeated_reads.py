"""One value that several layer nodes stand for has one gradient: the sum over all of them."""

from __future__ import annotations

import operator

import torch

from moegraph import ops
from moegraph.graph.build import GraphBuilder
from moegraph.graph.edit import Rewriter
from moegraph.graph.program import Parameter, Port
from moegraph.step.joint import trace_joint
from moegraph.verify.run import run_graph

F64 = torch.float64


def test_a_parameter_read_by_two_nodes_gets_the_gradient_of_both() -> None:
    builder = GraphBuilder("test")
    hidden = builder.input("hidden", (3, 4), F64)
    weight = builder.parameter(Parameter("w", (4, 4), "matrix", "normal", 0.1, dtype=F64))
    once = builder.call("once", ops.linear, hidden, weight, None)
    twice = builder.call("twice", ops.linear, once, weight, None)
    builder.output("hidden", "hidden", twice)
    layer = builder.finish("block")
    rewriter = Rewriter(layer, "test")
    (first,) = rewriter.graph.find_nodes(op="get_attr")
    again = rewriter.copy_before(next(iter(first.users)), first, "w_again", {})
    list(first.users)[-1].replace_input_with(first, again)
    split = rewriter.finish()

    generator = torch.Generator().manual_seed(0)
    x, w, t = (torch.randn(shape, generator=generator, dtype=F64) for shape in ((3, 4), (4, 4), (3, 4)))
    inputs = {Port("parameter", "w"): w, Port("input", "hidden"): x, Port("tangent", "hidden"): t}
    found = run_graph(trace_joint(split), inputs).results
    leaf = w.clone().requires_grad_()
    (expected,) = torch.autograd.grad((x @ leaf.t()) @ leaf.t(), leaf, t)
    assert torch.equal(found[Port("grad", "w")], run_graph(trace_joint(layer), inputs).results[Port("grad", "w")])
    torch.testing.assert_close(found[Port("grad", "w")], expected)


def test_a_result_taken_twice_gets_the_gradient_of_both() -> None:
    builder = GraphBuilder("test")
    hidden = builder.input("hidden", (1, 3, 2, 4), F64)
    core = builder.call("core", ops.attention, hidden, hidden, hidden, None, window=None, scale=0.5)
    first = builder.result("context", core, 0)
    second = builder.call("context_again", operator.getitem, core, -2)
    builder.output("hidden", "hidden", builder.call("sum", ops.add, first, second))
    inputs = {
        Port("input", "hidden"): torch.randn(1, 3, 2, 4, dtype=F64),
        Port("tangent", "hidden"): torch.randn(1, 3, 2, 4, dtype=F64),
    }
    gradient = run_graph(trace_joint(builder.finish("block")), inputs).results[Port("grad_input", "hidden")]

    x = inputs[Port("input", "hidden")].clone().requires_grad_()
    context = ops.attention(x, x, x, None, window=None, scale=0.5)[0]
    (expected,) = torch.autograd.grad(context + context, x, inputs[Port("tangent", "hidden")])
    torch.testing.assert_close(gradient, expected)
