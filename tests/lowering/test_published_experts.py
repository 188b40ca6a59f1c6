"""One feed-forward of gpt-oss and of JetMoE against transformers' own module, in float64: router, experts and biases,
from x to what is added to the residual stream, and back to every gradient."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from moegraph.graph.build import GraphBuilder
from moegraph.graph.program import Port
from moegraph.lowering.context import Lowering
from moegraph.lowering.feed_forward import lower_moe
from moegraph.specs import Spec
from moegraph.step.joint import Differentiator
from tests.small_models import SEQ_LEN, SEQUENCES, relative_error, small_spec

T, D, F, E = SEQ_LEN * SEQUENCES, 32, 16, 8
SOFTMAX_OF_CHOSEN = "score: none, weight_from: softmax_selected"


def published(config: str, module: str, model: str, **options: Any) -> torch.nn.Module:
    """A transformers module in float64 with random weights, as its own class is made from its configuration."""
    transformers = pytest.importorskip("transformers", minversion="5.24")
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    settings = getattr(transformers, config)(
        hidden_size=D, intermediate_size=F, num_local_experts=E, num_experts_per_tok=2, **options
    )
    settings._experts_implementation = "eager"
    made: torch.nn.Module = getattr(getattr(transformers.models, model), f"modeling_{model}").__dict__[module](settings)
    with torch.no_grad():
        for value in made.parameters():
            value.copy_(torch.randn_like(value) * 0.3)
    return made.double()


def run_ours(spec: Spec, weights: dict[str, Tensor], x: Tensor, grad: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The output of the lowered experts alone, and the gradients of x (as `x`) and of each weight."""
    lowering = Lowering(spec, GraphBuilder("lower"))
    out = lower_moe(lowering, lowering.builder.input("hidden", (T, D), torch.float64), None)
    lowering.builder.output("hidden", "hidden", out)
    layer = lowering.builder.finish("moe")
    assert weights.keys() == layer.meta["parameters"].keys()
    inputs = {Port("parameter", name): value.detach().clone() for name, value in weights.items()}
    inputs |= {Port("input", "hidden"): x.detach(), Port("tangent", "hidden"): grad}
    outputs, gradients = Differentiator(layer)(inputs)
    return outputs[-1], {"x" if p.role == "grad_input" else p.name: g for p, g in gradients.items()}


def check(ours: tuple[Tensor, dict[str, Tensor]], out: Tensor, gradients: dict[str, Tensor], bound: float) -> None:
    assert relative_error(ours[0], out) < bound
    assert ours[1].keys() == gradients.keys()
    worst = {name: relative_error(ours[1][name], gradient) for name, gradient in gradients.items()}
    assert max(worst.values()) < bound, worst


def halves(weight: Tensor) -> Tensor:
    """Columns gate, up, gate, up … → all of gate, then all of up."""
    return torch.cat([weight[..., ::2], weight[..., 1::2]], -1)


@pytest.mark.parametrize("limit", [7.0, 0.5])
def test_the_experts_of_gpt_oss(limit: float) -> None:
    theirs: Any = published("GptOssConfig", "GptOssMLP", "gpt_oss", swiglu_alpha=1.702, swiglu_limit=limit)
    x, grad = torch.randn(2, T, D, dtype=torch.float64).unbind()
    x.requires_grad_()
    out, _ = theirs(x[None])
    out.backward(grad[None])

    def ours(value: Any) -> dict[str, Tensor]:
        experts, router = theirs.experts, theirs.router
        return {
            "moe.router.weight": value(router.weight),
            "moe.router.bias": value(router.bias),
            "moe.w_up": halves(value(experts.gate_up_proj)).transpose(1, 2),
            "moe.up.bias": halves(value(experts.gate_up_proj_bias)),
            "moe.w_down": value(experts.down_proj).transpose(1, 2),
            "moe.down.bias": value(experts.down_proj_bias),
        }

    spec = small_spec(
        "model.moe.shared=null",
        "model.moe.expert_bias=true",
        f"model.moe.activation={{kind: swiglu_clamped, alpha: 1.702, limit: {limit}}}",
        f"model.moe.router={{{SOFTMAX_OF_CHOSEN}, gate_bias: true}}",
    )
    with torch.no_grad():
        gate, up = (x @ ours(lambda p: p)["moe.w_up"].transpose(1, 2)).chunk(2, -1)
        assert bool((gate > limit).any() and (up.abs() > limit).any()) == (limit < 1)
    found = run_ours(spec, ours(lambda p: p), x, grad)
    assert x.grad is not None
    check(found, out[0], {"x": x.grad, **ours(lambda p: p.grad)}, 1e-13)


def test_the_experts_of_jetmoe_with_one_bias_behind_them() -> None:
    theirs: Any = published("JetMoeConfig", "JetMoeMoE", "jetmoe", activation_function="silu")
    x, grad = torch.randn(2, T, D, dtype=torch.float64).unbind()
    x.requires_grad_()
    out = theirs(x[None])
    out.backward(grad[None])

    def ours(value: Any) -> dict[str, Tensor]:
        return {
            "moe.router.weight": value(theirs.router.layer.weight),
            "moe.w_up": value(theirs.input_linear.weight),
            "moe.w_down": value(theirs.output_linear.weight),
            "moe.output.bias": value(theirs.bias),
        }

    router = f"model.moe.router={{{SOFTMAX_OF_CHOSEN}}}"
    spec = small_spec("model.moe.shared=null", "model.moe.output_bias=true", router)
    found = run_ours(spec, ours(lambda p: p), x, grad)
    assert x.grad is not None
    check(found, out[0], {"x": x.grad, **ours(lambda p: p.grad)}, 1e-6)  # its router's logits are always float32
