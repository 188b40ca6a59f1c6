"""The experts of gpt-oss in a small model: biases start at zero, are counted and learn, and every pass is exact."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moegraph.lowering import lower
from moegraph.runtime.accounting import count_parameters, flops_per_token
from moegraph.runtime.initialise import initial_value, initial_values
from moegraph.runtime.parameter_groups import parameter_groups
from moegraph.specs.schema import ParameterGroup
from moegraph.verify.passes import verify_spec
from tests.small_models import compile_once, compute_step, random_batch, relative_error, small_spec, start_values

from .small_runs import run, run_spec

CLAMPED = "model.moe.activation={kind: swiglu_clamped, limit: 0.5}"
ROUTER = "model.moe.router={score: none, weight_from: softmax_selected, gate_bias: true}"
GPT_OSS = (CLAMPED, ROUTER, "model.moe.expert_bias=true", "model.num_layers=2")
BIASES = ("layers.1.moe.up.bias", "layers.1.moe.down.bias")


def test_biases_are_experts_parameters_that_start_at_zero() -> None:
    program = lower(small_spec(*GPT_OSS))
    assert [program.parameters[name].shape for name in BIASES] == [(8, 2 * 16), (8, 32)]
    assert all(program.parameters[name].experts for name in BIASES)
    values = initial_values(program.parameters.values(), 0, torch.float32)
    assert not any(values[name].any() for name in BIASES)
    assert initial_value(program.parameters[BIASES[0]], 0, torch.float32, range(2, 5)).shape == (3, 32)


def test_a_token_meets_the_biases_of_the_experts_it_visits_and_they_cost_no_products() -> None:
    spec, plain = small_spec(*GPT_OSS), small_spec(ROUTER, "model.num_layers=2")
    (total, active), (total_plain, active_plain) = (count_parameters(lower(s)) for s in (spec, plain))
    assert total - total_plain == 8 * (32 + 32)
    assert active - active_plain == 2 * (32 + 32)
    assert flops_per_token(spec, lower(spec)) == flops_per_token(plain, lower(plain))
    single = lower(small_spec("model.moe.output_bias=true", "model.num_layers=2"))
    assert single.parameters["layers.1.moe.output.bias"].shape == (32,)


def test_one_rule_keeps_weight_decay_from_every_bias() -> None:
    parameters = lower(small_spec(*GPT_OSS, "model.moe.output_bias=true")).parameters
    groups = parameter_groups(parameters, (ParameterGroup(match="*.bias", weight_decay=0.0),), 0.1)
    free = {name for name, values in groups.items() if values.weight_decay == 0.0}
    assert free == {*BIASES, "layers.1.moe.output.bias", "layers.1.moe.router.bias"}


def test_experts_without_tokens_have_bias_gradients_of_exactly_zero() -> None:
    spec = small_spec(*GPT_OSS)
    compiled = compile_once(spec)
    values = start_values(compiled.program)
    values["layers.1.moe.router.bias"][[2, 5]] = 1e3  # every token to the same two
    computed, gradients = compute_step(spec, random_batch(spec, padding=3), values, compiled)
    assert computed.expert_counts is not None
    assert computed.expert_counts[0].count_nonzero() == 2
    for name in BIASES:
        assert gradients[name].any(1).tolist() == [expert in (2, 5) for expert in range(8)]


def test_the_gradients_of_biases_are_those_of_finite_differences() -> None:
    spec = small_spec(*GPT_OSS, "model.moe.output_bias=true")
    compiled, batch = compile_once(spec), random_batch(spec)
    values = start_values(compiled.program)
    _, gradients = compute_step(spec, batch, values, compiled)
    for name in (*BIASES, "layers.1.moe.output.bias"):
        direction = torch.randn(values[name].shape, generator=torch.Generator().manual_seed(1)).double()

        def loss(scale: float, name: str = name, direction: torch.Tensor = direction) -> float:
            moved = {**values, name: values[name] + scale * direction}
            return float(compute_step(spec, batch, moved, compiled)[0].loss)

        slope = float((gradients[name] * direction).sum())
        assert (loss(1e-6) - loss(-1e-6)) / 2e-6 == pytest.approx(slope, rel=1e-5), name


@pytest.mark.parametrize(
    ("policy", "compute"),
    [
        pytest.param("full", "fp64", marks=pytest.mark.slow),
        ("selective", "bf16"),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("none", "fp64"), ("selective", "fp64"))),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("none", "bf16"), ("full", "bf16"))),
    ],
)
def test_every_pass_is_exact(policy: str, compute: str) -> None:
    recompute = f"passes.recompute.policy={policy}"
    report = verify_spec(small_spec(*GPT_OSS, "model.moe.output_bias=true", recompute, f"precision.compute={compute}"))
    assert report.rows
    for row in report.rows:
        assert row.ok, row
        assert row.planted_found is not False, row
        assert row.output_difference == row.gradient_difference == 0.0, row


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_it_learns(tokens: Path, tmp_path: Path, compute: str) -> None:
    overrides = ("train.steps=10", "train.optimizer.lr=3e-3", f"precision.compute={compute}")
    done = run(run_spec(tmp_path, *GPT_OSS, *overrides), tokens)
    losses = torch.tensor(done.column("loss"))
    assert losses.isfinite().all()
    assert losses[-1] < losses[0] - 0.5
    assert all(done.weights[name].any() for name in BIASES)


def test_a35_in_mxfp8_they_stay_finite_for_20_steps_and_near_bf16(tokens: Path, tmp_path: Path) -> None:
    """Clamped and biased experts in MXFP8 became NaN elsewhere, in training only."""
    sizes = ("model.moe.d_ff=32", "model.moe.shared=null", "model.dense=null", "model.num_layers=1")
    overrides = (*GPT_OSS, *sizes, "train.steps=20", "train.optimizer.lr=3e-3", "precision.compute=bf16")
    low = "precision.mxfp8={experts: 'on', wgrad: mxfp8}"
    plain, done = (
        run(run_spec(tmp_path / name, *overrides, *more), tokens)
        for name, more in (("bf16", ()), ("mxfp8", (low, "passes.fuse-experts.enabled=true")))
    )
    assert all(torch.tensor(done.column(name)).isfinite().all() for name in ("loss", "grad_norm"))
    assert all(value.isfinite().all() for value in done.weights.values())
    losses, expected = torch.tensor(done.column("loss")), torch.tensor(plain.column("loss"))
    assert losses.shape == (20,)
    assert losses[-1] < losses[0] - 0.5
    assert 0 < float((losses - expected).abs().max()) < 0.05
    assert all(done.weights[name.replace("layers.1", "layers.0")].any() for name in BIASES)


def test_the_precisions_agree() -> None:
    found = {}
    for compute in ("fp64", "fp32", "bf16"):
        spec = small_spec(*GPT_OSS, f"precision.compute={compute}")
        values = start_values(compile_once(spec).program, spread=1.0)
        found[compute] = compute_step(spec, random_batch(spec), values)[1][BIASES[0]]
    assert relative_error(found["fp32"], found["fp64"]) < 1e-4
    assert relative_error(found["bf16"], found["fp64"]) < 0.1
