"""One step of models at the edges: every precision, tied embeddings, one expert, idle experts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from moegraph.compiled import Compiled
from moegraph.runtime.executor import Executor
from moegraph.runtime.gradient_norm import global_norm
from moegraph.runtime.gradients import GradientBuffers
from moegraph.runtime.model_state import ModelState
from moegraph.runtime.step import StepComputer
from tests.everyday import everyday
from tests.small_models import CPU, compile_once, compute_step, random_batch, relative_error, small_spec, start_values

from .small_runs import run, run_spec

TWO_LAYERS = "model.num_layers=2"


def moe(**fields: object) -> tuple[str, ...]:
    """The experts of a two-layer model, whose first layer is dense."""
    return (TWO_LAYERS, *(f"model.moe.{name}={value}" for name, value in fields.items()))


@pytest.mark.parametrize(
    "overrides",
    [
        moe(num_experts=1, top_k=1),
        moe(num_experts=4, top_k=1),
        moe(num_experts=4, top_k=4),
        moe(num_experts=64, top_k=1),  # as many experts as tokens: most have none
        (*moe(num_experts=8), "train.tokens_per_step=2", "data.seq_len=2"),
        (*moe(shared="null"), "model.dense=null"),
        (TWO_LAYERS, "model.moe=null", "model.dense={d_ff: 32, layers: all}"),
    ],
    ids=["E1-k1", "k1", "k-is-E", "E64-k1", "two-tokens", "no-shared-no-dense", "dense"],
)
@pytest.mark.parametrize("compute", everyday(["bf16", "fp64"]))
def test_a_step_is_finite_and_every_trained_parameter_is_reached(overrides: tuple[str, ...], compute: str) -> None:
    spec = small_spec(*overrides, f"precision.compute={compute}")
    batch = random_batch(spec)
    computed, gradients = compute_step(spec, batch)
    assert computed.loss.isfinite()
    assert global_norm(gradients).isfinite()
    unreached = {name.partition(".")[2] for name, gradient in gradients.items() if not gradient.any()}
    attention = {f"{n}.attention.{p}.weight" for n in (0, 1) for p in ("q", "k", "q_norm", "k_norm")}
    if batch.tokens.numel() == 2:  # two documents of one token: attention to a single key is a constant
        assert unreached <= attention, unreached
    else:
        only_one = spec.model.moe is not None and spec.model.moe.num_experts == 1
        assert unreached <= ({"1.moe.router.weight"} if only_one else set()), unreached


def test_all_tokens_on_one_expert_leave_the_others_exactly_zero_gradients() -> None:
    spec = small_spec(*moe(top_k=1, router="{select_bias: learned_free}"))
    compiled = compile_once(spec)
    values = start_values(compiled.program)
    values["layers.1.moe.select_bias"][5] = 1e3
    computed, gradients = compute_step(spec, random_batch(spec), values, compiled)
    assert computed.expert_counts is not None
    assert computed.expert_counts.tolist() == [[0, 0, 0, 0, 0, 64, 0, 0]]
    for name in ("layers.1.moe.w_up", "layers.1.moe.w_down"):
        reached = gradients[name].flatten(1).any(1)
        assert reached.tolist() == [expert == 5 for expert in range(8)]
        assert gradients[name].isfinite().all()


@pytest.mark.slow
def test_equal_tokens_are_ties_and_recomputing_routes_them_the_same() -> None:
    """a38: a batch of one token repeated, under each policy of recomputation."""
    results = []
    for policy in ("none", "full"):
        spec = small_spec(TWO_LAYERS, f"passes.recompute.policy={policy}")
        batch = random_batch(spec)
        batch.tokens.fill_(7)
        results.append(compute_step(spec, batch))
    (first, first_gradients), (second, second_gradients) = results
    assert first.expert_counts is not None
    assert second.expert_counts is not None
    assert torch.equal(first.expert_counts, second.expert_counts)
    assert torch.equal(first_gradients.flat, second_gradients.flat)


def tied_and_untied() -> tuple[Compiled, Compiled]:
    options = (TWO_LAYERS, "model.moe.balance={coef: 0, z_coef: 0}")
    tied = compile_once(small_spec(*options, "model.tie_embeddings=true"))
    return tied, compile_once(small_spec(*options))


def test_the_gradient_of_a_tied_embedding_is_the_sum_of_both_its_uses() -> None:
    tied, untied = tied_and_untied()
    values = start_values(tied.program)
    assert "head.weight" not in values
    batch = random_batch(tied.spec)
    computed, gradients = compute_step(tied.spec, batch, values, tied)
    twice = {**values, "head.weight": values["embedding.weight"]}
    expected, parts = compute_step(untied.spec, batch, twice, untied)
    assert torch.equal(computed.loss, expected.loss)
    assert relative_error(gradients["embedding.weight"], parts["embedding.weight"] + parts["head.weight"]) < 1e-14
    assert parts["embedding.weight"].any()
    assert parts["head.weight"].any()


def test_the_gradient_of_a_tied_embedding_is_that_of_finite_differences() -> None:
    tied, _ = tied_and_untied()
    values, batch = start_values(tied.program), random_batch(tied.spec)
    direction = torch.randn(values["embedding.weight"].shape, generator=torch.Generator().manual_seed(1)).double()
    _, gradients = compute_step(tied.spec, batch, values, tied)

    def loss(scale: float) -> float:
        moved = {**values, "embedding.weight": values["embedding.weight"] + scale * direction}
        return float(compute_step(tied.spec, batch, moved, tied)[0].loss)

    slope = float((gradients["embedding.weight"] * direction).sum())
    assert (loss(1e-6) - loss(-1e-6)) / 2e-6 == pytest.approx(slope, rel=1e-5)


def test_in_bf16_masters_are_fp32_and_what_the_graphs_read_is_them_rounded() -> None:
    spec = small_spec(TWO_LAYERS, "precision.compute=bf16", "model.moe.router.select_bias=learned_free")
    program = compile_once(spec).program
    state = ModelState(spec, program, CPU)
    gradients = GradientBuffers(program.trained(), torch.float32, CPU)
    computer = StepComputer(spec, Executor(program, state.values, CPU, "eager"), gradients, CPU)
    masters = state.optimizer.masters
    start = masters.flat.clone()
    for seed in range(3):
        computed = computer.compute(random_batch(spec, seed))
        state.commit(gradients, float(global_norm(gradients)), 1e-3, computed.expert_counts)
    assert masters.flat.dtype == gradients.flat.dtype == torch.float32
    assert not torch.equal(masters.flat, start)
    rounded = 0
    for name, master in masters.items():
        value = state.values[name]
        if "router" in name:
            assert value is master, name  # fp32, and never a copy that could go stale
        else:
            assert value.dtype == torch.bfloat16, name
            assert torch.equal(value, master.to(torch.bfloat16)), name
            rounded += not torch.equal(value.float(), master)
    assert rounded > len(masters) // 2  # the masters do hold more than their copies
    assert state.values["layers.1.moe.select_bias"].dtype == torch.float32


@pytest.mark.parametrize(
    ("compute", "dtype"), [("bf16", torch.float32), ("fp32", torch.float32), ("fp64", torch.float64)]
)
def test_final_weights_are_the_masters_in_every_precision(
    compute: str, dtype: torch.dtype, tokens: Path, tmp_path: Path
) -> None:
    done = run(
        run_spec(tmp_path, TWO_LAYERS, "train.steps=8", "train.optimizer.lr=3e-3", f"precision.compute={compute}"),
        tokens,
    )
    assert {value.dtype for value in done.weights.values()} == {dtype}
    assert done.column("loss")[-1] < done.column("loss")[0] - 0.3


def test_the_precisions_agree_with_each_other() -> None:
    """The same start and batch: fp32 within 1e-5 of fp64, bf16 within a few per cent."""
    found: dict[str, tuple[float, Tensor]] = {}
    for compute in ("fp64", "fp32", "bf16"):
        spec = small_spec(TWO_LAYERS, f"precision.compute={compute}")
        compiled = compile_once(spec)
        # A real start, so that no choice of experts hangs on a rounding.
        values = start_values(compiled.program, spread=1.0)
        computed, gradients = compute_step(spec, random_batch(spec), values, compiled)
        found[compute] = float(computed.loss), gradients["layers.0.attention.q.weight"].double()
    loss, gradient = found["fp64"]
    assert found["fp32"][0] == pytest.approx(loss, rel=1e-5)
    assert relative_error(found["fp32"][1], gradient) < 1e-4
    assert found["bf16"][0] == pytest.approx(loss, rel=1e-2)
    assert relative_error(found["bf16"][1], gradient) < 0.1
