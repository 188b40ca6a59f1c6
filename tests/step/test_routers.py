"""Every router of the vocabulary runs end to end: one step through compiled graphs, finite, learning, and as chosen."""

from __future__ import annotations

import itertools
from functools import cache

import pytest
import torch

from moegraph.runtime.computed import Computed
from moegraph.runtime.gradients import GradientBuffers
from moegraph.specs import Spec
from tests.everyday import everyday
from tests.small_models import compile_once, compute_step, random_batch, relative_error, small_spec, start_values
from tests.step.kinds import ONE_LAYER, SIGMOID, R

ROUTERS = {
    "olmoe": (f"{R}={{score: softmax}}",),
    "qwen3": (f"{R}={{norm: {{kind: sum}}}}",),
    "gpt-oss": (f"{R}={{score: none, weight_from: softmax_selected, gate_bias: true}}",),
    "deepseek-v2": (f"{R}={{groups: {{n: 4, keep: 2, score: max, fill: zero}}, scale: 16}}",),
    "deepseek-v3": (SIGMOID + "norm: {kind: sum, eps: 1e-20}, scale: 2.5}",),
    "ernie": (f"{R}={{select_bias: learned_free, norm: {{kind: sum, eps: 1e-12, mode: clamp}}}}",),
    "minimax": (f"{R}={{score: sigmoid, select_bias: learned_free, norm: {{kind: sum}}}}",),
    "llama4": (f"{R}={{score: none, weight_from: sigmoid_selected, apply: input}}", "model.moe.top_k=1"),
    "switch": (f"{R}={{score: softmax}}", "model.moe.top_k=1"),
    "raw": (f"{R}={{score: none}}",),
    "one group": (f"{R}={{score: sigmoid, groups: {{n: 1, keep: 1}}}}",),
}


@cache
def step(name: str, apply: str) -> tuple[Computed, GradientBuffers]:
    """One step with a router, its weights applied to the experts' output or input, without a balance loss."""
    spec = spec_of(name, apply)
    return compute_step(spec, random_batch(spec))


def spec_of(name: str, apply: str) -> Spec:
    return small_spec(*ONE_LAYER, *ROUTERS[name], f"{R}.apply={apply}", "model.moe.balance.coef=0")


@pytest.mark.parametrize("name", everyday(ROUTERS))
@pytest.mark.parametrize("apply", ["output", "input"])
def test_a_router_takes_a_step_and_its_weights_get_a_gradient(name: str, apply: str) -> None:
    computed, gradients = step(name, apply)
    assert torch.isfinite(computed.loss)
    assert torch.isfinite(gradients.flat).all()
    assert float(gradients["layers.0.moe.router.weight"].norm()) > 0
    assert computed.expert_counts is not None
    moe = spec_of(name, apply).model.moe
    assert moe is not None
    assert int(computed.expert_counts.sum()) == moe.top_k * 16


# Softmax over all, renormalised over the chosen, is softmax over the chosen while the biases are zero.
SAME = {"qwen3", "gpt-oss", "ernie"}


@pytest.mark.parametrize("sides", [("output",), pytest.param(("output", "input"), marks=pytest.mark.slow)])
def test_routers_and_sides_are_different_functions(sides: tuple[str, ...]) -> None:
    """No two of these specs are one model: a choice that was ignored would make two losses equal."""
    losses = {(name, apply): float(step(name, apply)[0].loss) for name in ROUTERS for apply in sides}
    for (one, side), (other, its_side) in itertools.combinations(losses, 2):
        equal = abs(losses[one, side] - losses[other, its_side]) < 1e-10
        assert equal == (side == its_side and {one, other} <= SAME), (one, side, other, its_side)


@pytest.mark.parametrize("name", ["deepseek-v3"])
def test_a_compiled_step_is_the_eager_step(name: str) -> None:
    spec = small_spec(*ONE_LAYER, *ROUTERS[name])
    batch = random_batch(spec)
    eager, expected = compute_step(spec, batch)
    computed, gradients = compute_step(small_spec(*ONE_LAYER, *ROUTERS[name], "train.compile=aot_eager"), batch)
    assert relative_error(computed.loss, eager.loss) < 1e-12
    assert relative_error(gradients.flat, expected.flat) < 1e-10


@pytest.mark.parametrize("favoured", [0, 5])
def test_a_selection_bias_moves_the_choice_and_carries_no_gradient(favoured: int) -> None:
    spec = small_spec(*ONE_LAYER, f"{R}={{score: sigmoid, select_bias: learned_free}}")
    compiled = compile_once(spec)
    values = start_values(compiled.program)
    values["layers.0.moe.select_bias"][favoured] = 100.0
    computed, gradients = compute_step(spec, random_batch(spec), values, compiled)
    assert computed.expert_counts is not None
    assert int(computed.expert_counts[0, favoured]) == computed.tokens
    assert "layers.0.moe.select_bias" not in gradients


def test_a_bias_that_moves_no_choice_moves_no_number() -> None:
    """The bias is for the choice only: the same for every expert, it changes nothing at all."""
    spec = small_spec(*ONE_LAYER, f"{R}={{score: sigmoid, select_bias: learned_free}}")
    compiled, batch = compile_once(spec), random_batch(spec)
    values = start_values(compiled.program)
    plain, expected = compute_step(spec, batch, values, compiled)
    values["layers.0.moe.select_bias"].fill_(0.25)
    moved, gradients = compute_step(spec, batch, values, compiled)
    assert torch.equal(moved.loss, plain.loss)
    assert torch.equal(gradients.flat, expected.flat)
