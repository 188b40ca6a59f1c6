"""Awkward batches, routings and models under several layouts: everything still equals one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moegraph.errors import RunError, SpecError
from moegraph.runtime.engine import Engine, capacity_ladder
from moegraph.runtime.mesh import join
from tests.parallel.steps import CPU, Outcome, batch_of, compiled_once, enlarge, layout_spec, run_steps
from tests.parallel.test_invariance import compare
from tests.ranks import RankFailed, RankPool

TWO = {"dp": 2, "ep": 2}
PIPELINE = {"dp": 2, "ep": 2, "pp": 2, "microbatches": 4}
ONE_EXPERT = ("model.moe.router.gate_bias=true",)


def both(ranks: RankPool, layout: dict[str, Any], *overrides: str, bound: float = 1e-10, **options: Any) -> Outcome:
    """A layout and one process on the same spec; compared, and what the layout gave."""
    single = {"microbatches": 1}
    (expected,) = ranks.run(1, run_steps, layout_spec(*overrides, **single), *options.values())
    spec = layout_spec(*overrides, **layout)
    found = ranks.run(spec.layout.world, run_steps, spec, *options.values())[0]
    compare(found, expected, bound)
    return found


def test_ranks_without_a_token_and_sequences_of_uneven_length(ranks: RankPool) -> None:
    """The last quarter of the batch is padding: with four ranks one of them has no token."""
    found = both(ranks, {"dp": 4, "ep": 4, "transport": "padded", "capacity": 4.0}, steps=2, empty=4)
    assert sum(found.numbers[0]["expert_counts"][0]) > 0


@pytest.mark.parametrize(
    "layout",
    [{**TWO, "transport": "padded"}, pytest.param({**PIPELINE, "transport": "padded"}, marks=pytest.mark.slow)],
    ids=["ep", "pp"],
)
def test_all_tokens_to_one_expert_is_one_replay_and_then_equal(ranks: RankPool, layout: dict[str, Any]) -> None:
    """A start where the first two experts get everything: both lie on one rank."""
    (expected,) = ranks.run(1, one_sided, layout_spec(*ONE_EXPERT))
    spec = layout_spec(*ONE_EXPERT, **layout)
    found = ranks.run(spec.layout.world, one_sided, spec)[0]
    compare(found, expected)
    assert found.replays == 1
    assert found.capacity == 2.0
    assert all(sum(layer[2:]) == 0 for layer in found.numbers[0]["expert_counts"])


def one_sided(rank: int, spec: Any) -> Outcome:
    return run_steps(rank, spec, 2, 0, 6.0, {"moe.router.bias": torch.tensor([60.0, 50.0, 0.0, 0.0])})


@pytest.mark.slow
def test_three_forced_replays_leave_everything_as_without_them(ranks: RankPool) -> None:
    """Every rung of a ladder of four is used, and biases, data and numbers are those of a run that needed none."""
    ladder = {"dp": 4, "ep": 4, "transport": "padded", "capacity": 1.0}
    expected = ranks.run(4, run_steps, layout_spec(dp=4, ep=4, transport="padded", capacity=4.0))[0]
    found = ranks.run(4, forced_replays, layout_spec(**ladder))[0]
    assert found.replays == 3
    assert capacity_ladder(layout_spec(**ladder)) == [1.0, 2.0, 4.0]
    compare(found, expected, 1e-12)


def forced_replays(rank: int, spec: Any) -> Outcome:
    """Every rung of the ladder is forced in the first step, whatever the routing."""
    return run_steps(rank, spec, 3, 0, 6.0, {}, True)


def test_an_overflow_with_overflow_error_stops_every_rank_and_changes_nothing(ranks: RankPool) -> None:
    spec = layout_spec(*ONE_EXPERT, **TWO, transport="padded", overflow="error")
    said = ranks.run(2, overflow_error, spec)
    assert all("rows found no place at capacity 1.25, and layout.overflow is error" in text for text in said)


def overflow_error(rank: int, spec: Any) -> str:
    with join(spec.layout, rank, spec.layout.world, CPU) as mesh:
        engine = Engine(spec, CPU, mesh, compiled_once(spec.model_dump_json(by_alias=True)))
        enlarge(engine, 6.0, {"moe.router.bias": torch.tensor([60.0, 50.0, 0.0, 0.0])})
        before = {name: value.clone() for name, value in engine.state.optimizer.masters.items()}
        try:
            engine.compute(batch_of(0))
        except RunError as error:
            assert all(torch.equal(before[name], value) for name, value in engine.state.optimizer.masters.items())
            return str(error)
        return "nothing"


def test_drop_counts_what_it_drops_and_keeps_the_largest_weights(ranks: RankPool) -> None:
    spec = layout_spec(*ONE_EXPERT, **TWO, transport="padded", overflow="drop", capacity=1.0)
    numbers = ranks.run(2, run_steps_one_sided_drop, spec)[0].numbers[0]
    tokens = 8 * 6  # on each rank; every choice goes to rank 0, where half of them fit
    assert numbers["overflow"] == 0
    assert numbers["dropped"] == [2 * tokens, 2 * tokens]


def run_steps_one_sided_drop(rank: int, spec: Any) -> Outcome:
    return run_steps(rank, spec, 1, 0, 6.0, {"moe.router.bias": torch.tensor([60.0, 50.0, 0.0, 0.0])})


@pytest.mark.slow
@pytest.mark.parametrize(("over", "layers"), [("micro_batch", "sum"), ("global_batch", "mean")])
def test_balance_losses_over_more_than_a_sequence(ranks: RankPool, over: str, layers: str) -> None:
    """`micro_batch` is the same where the micro-batches are; `global_batch` under any layout that may have it."""
    balance = f"model.moe.balance={{definition: switch, over: {over}, layers: {layers}, coef: 0.1, z_coef: 0.01}}"
    if over == "micro_batch":
        (expected,) = ranks.run(1, run_steps, layout_spec(balance, microbatches=4), 1)
        found = ranks.run(4, run_steps, layout_spec(balance, dp=2, ep=2, pp=2, microbatches=2), 1)[0]
        compare(found, expected)
    else:
        both(ranks, {**PIPELINE, "schedule": "gpipe"}, balance, steps=1)


# The last stage elsewhere, and here.
@pytest.mark.parametrize("schedule", [pytest.param("interleaved_zero_bubble", marks=pytest.mark.slow), "dual_pipe_v"])
def test_tied_embeddings_under_a_pipeline(ranks: RankPool, schedule: str) -> None:
    both(ranks, {"dp": 2, "pp": 2, "microbatches": 4, "schedule": schedule}, "model.tie_embeddings=true", steps=2)


def test_a_pipeline_with_a_stage_of_dense_layers_only(ranks: RankPool) -> None:
    stages = "embedding,0|1,2,3,head"
    both(ranks, {"pp": 2, "microbatches": 2, "stages": stages}, "model.dense.layers=[0, 3]", steps=1)


@pytest.mark.parametrize("fused", [pytest.param(False, marks=pytest.mark.slow), True])
def test_float32_gradients_are_within_rounding(ranks: RankPool, fused: bool) -> None:
    options = ["precision.compute=fp32", f"passes.fuse-experts.enabled={fused}".lower()]
    layout = {"dp": 4, "ep": 2, "transport": "padded", "capacity": 2.0}
    expected = ranks.run(1, run_steps, layout_spec(*options), 1)[0]
    found = ranks.run(4, run_steps, layout_spec(*options, **layout), 1)[0]
    for name, gradient in expected.gradients[0].items():
        error = (found.gradients[0][name] - gradient).norm() / gradient.norm()
        assert error < 1e-5, name


@pytest.mark.slow
def test_clamped_biased_experts_whose_input_is_scaled(ranks: RankPool) -> None:
    """gpt-oss's experts and a router that scales their input, dispatched."""
    moe = [
        "model.moe.activation={kind: swiglu_clamped, alpha: 1.702, limit: 7.0}",
        "model.moe.expert_bias=true",
        "model.moe.router.apply=input",
    ]
    both(ranks, {**TWO, "transport": "padded", "capacity": 2.0}, *moe, steps=2)


def test_what_cannot_be_spread_is_refused_with_the_divisors() -> None:
    with pytest.raises(SpecError, match=r"num_experts 4 is not divisible by ep 3; valid ep: 1, 2, 4"):
        layout_spec(dp=3, ep=3)
    with pytest.raises(SpecError, match=r"microbatches 1 is fewer than the 2 stages"):
        layout_spec(pp=2, microbatches=1)


def test_a_rank_that_raises_is_told_by_the_pool(ranks: RankPool) -> None:
    pool = RankPool(1)
    with pytest.raises(RankFailed, match="ZeroDivisionError"):
        pool.run(1, divide, 0)
    pool.close()


def divide(rank: int, by: int) -> float:
    return 1 / by
