"""Every operator traces, with its gradient, into a static functional graph that never waits for the device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from moegraph import ops

from .op_cases import CASES, Case

SYNCHRONISING = {"_local_scalar_dense", "item", "nonzero", "bincount", "masked_select", "unique"}


def forward_and_gradients(case: Case, *tensors: Tensor) -> tuple[Tensor, ...]:
    leaves = [t.detach().requires_grad_(t.is_floating_point()) for t in tensors]
    results = case.results(*leaves)
    if not case.differentiable:
        return results
    trained = [t for t in leaves if t.requires_grad]
    outputs = [results[i] for i in case.outputs]
    grads = torch.autograd.grad(outputs, trained, [torch.ones_like(o) for o in outputs], allow_unused=True)
    return (*results, *(g for g in grads if g is not None))


def trace(case: Case) -> fx.GraphModule:
    return make_fx(lambda *t: forward_and_gradients(case, *t), tracing_mode="fake")(*case.inputs(torch.float32))


def overloads(graph: fx.Graph) -> list[torch._ops.OpOverload]:
    return [n.target for n in graph.nodes if isinstance(n.target, torch._ops.OpOverload)]


def problems(graph: fx.Graph) -> list[str]:
    """What would write in place, wait for the device, or have a size that depends on values."""
    found = [f"{op} writes to its arguments" for op in overloads(graph) if op._schema.is_mutable]
    found += [f"{op} waits for the device" for op in overloads(graph) if op._opname in SYNCHRONISING]
    for node in graph.nodes:
        values = node.meta.get("val")
        for value in values if isinstance(values, tuple | list) else [values]:
            if isinstance(value, Tensor) and free_unbacked_symbols(value):
                found.append(f"{node} has an unknown size")
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_trace_is_functional_static_and_equal(case: Case) -> None:
    traced = trace(case)
    assert problems(traced.graph) == []
    inputs = case.inputs(torch.float32)
    expected = forward_and_gradients(case, *inputs)
    for got, want in zip(traced(*inputs), expected, strict=True):
        assert torch.equal(got, want)


def test_the_trace_check_sees_a_planted_size_that_depends_on_values() -> None:
    planted = Case("planted", lambda x: x[x > 0], ((3,),), differentiable=False)
    assert any("unknown size" in problem for problem in problems(trace(planted).graph))


@pytest.mark.parametrize("name", ["grouped_mm", "embedding", "add_expert_bias"])
def test_weight_gradient_is_a_node_that_no_input_gradient_needs(name: str) -> None:
    graph = trace(next(c for c in CASES if c.name == name)).graph
    weight_gradients = [n for n in graph.nodes if n.target in ops.WEIGHT_GRADIENTS]
    assert len(weight_gradients) == 1
    assert all(user.op == "output" for user in weight_gradients[0].users)


def test_a_frozen_weight_costs_no_weight_gradient() -> None:
    def joint(rows: Tensor, weight: Tensor, offsets: Tensor) -> tuple[Tensor, ...]:
        rows = rows.detach().requires_grad_()
        return torch.autograd.grad(ops.grouped_mm(rows, weight, offsets).sum(), rows)

    case = next(c for c in CASES if c.name == "grouped_mm")
    graph = make_fx(joint, tracing_mode="fake")(*case.inputs(torch.float32)).graph
    assert not any(op in ops.WEIGHT_GRADIENTS for op in overloads(graph))


def test_registry_lists_every_callable_and_only_registered_overloads() -> None:
    listed = {f.__name__ for f in ops.OPERATORS}
    gradients = {"attention_backward", "cross_entropy_backward", "embedding_wgrad", "gather_weights_backward"}
    gradients |= {"embedding_wgrad_add", "linear_wgrad_add"}
    gradients |= {
        "grouped_mm_dgrad",
        "grouped_mm_wgrad",
        "grouped_mm_wgrad_add",
        "expert_ffn_dgrad",
        "expert_bias_wgrad",
        "direct_put",
        "direct_take",
    }
    helpers = {"attention_backend", "bucket_capacity", "grouped_mm_backend", "flops", "Facts"}
    helpers |= {"mx_quantize", "mx_dequantize"}
    constants = {"ACCUMULATIONS", "OPERATORS", "WEIGHT_GRADIENTS", "NEVER_RECOMPUTE", "COMMUNICATION", "EXPERT_GROUP"}
    constants |= {"SCALED_PRODUCTS", "ADDING"}
    assert listed == set(ops.__all__) - gradients - helpers - constants
    assert {facts.cost for facts in ops.OPERATORS.values()} == {"matmul", "gather", "pointwise"}
    for facts in ops.OPERATORS.values():
        assert all(isinstance(o, torch._ops.OpOverload) and o.namespace == "moegraph" for o in facts.overloads)


def test_importing_the_operators_does_not_need_triton() -> None:
    import subprocess
    import sys

    program = "import sys; sys.modules['triton'] = None; import moegraph.ops"
    subprocess.run([sys.executable, "-c", program], check=True)
