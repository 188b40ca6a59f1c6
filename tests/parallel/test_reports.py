"""Public bugs of others (numbers as in the issue tracker's collection): each is a trial here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moegraph.errors import RunError
from moegraph.runtime.engine import Engine, gather_weights
from moegraph.runtime.mesh import join
from tests.parallel.steps import CPU, batch_of, compiled_once, layout_spec, run_steps
from tests.parallel.test_invariance import compare, error
from tests.ranks import RankPool


def engine_of(spec: Any, mesh: Any) -> Engine:
    return Engine(spec, CPU, mesh, compiled_once(spec.model_dump_json(by_alias=True)))


@pytest.mark.parametrize("ep", [1])
def test_a14_a15_a19_expert_gradients_and_the_norm_do_not_depend_on_where_experts_live(
    ranks: RankPool, ep: int
) -> None:
    """ep 2 and 4 are in the covering set. With ep 1 experts are replicated over all ranks and reduced over all."""
    (expected,) = ranks.run(1, run_steps, layout_spec(), 1)
    found = ranks.run(4, run_steps, layout_spec(dp=4, ep=ep), 1)[0]
    compare(found, expected)
    assert found.numbers[0]["norm"] == pytest.approx(
        sum(float(g.square().sum()) for g in expected.gradients[0].values()) ** 0.5, rel=1e-12
    )


def test_a6_a7_balance_losses_act_once_with_recomputation_and_under_any_layout(ranks: RankPool) -> None:
    off = "model.moe.balance={coef: 0, z_coef: 0}"
    without = ranks.run(1, run_steps, layout_spec(off), 1)[0]
    with_it = ranks.run(1, run_steps, layout_spec(), 1)[0]
    again = ranks.run(2, run_steps, layout_spec("passes.recompute.policy=full", dp=2, ep=2), 1)[0]
    name = "layers.1.moe.router.weight"
    assert without.numbers[0]["balance"] == 0.0
    assert error(with_it.gradients[0][name], without.gradients[0][name]) > 1e-3
    assert again.numbers[0]["balance"] == pytest.approx(with_it.numbers[0]["balance"], rel=1e-12)
    assert error(again.gradients[0][name], with_it.gradients[0][name]) < 1e-10


def test_a17_a_nan_on_the_last_rank_alone_is_what_every_rank_agrees_on_and_nothing_has_changed(ranks: RankPool) -> None:
    said = ranks.run(2, nan_on_last_rank, layout_spec(dp=2, ep=2))
    assert said == ["nan", "nan"]


def nan_on_last_rank(rank: int, spec: Any) -> str:
    """The loss that this rank agrees on; asserts that its state is what it was."""
    with join(spec.layout, rank, spec.layout.world, CPU) as mesh:
        engine = engine_of(spec, mesh)
        before = {name: value.clone() for name, value in engine.state.optimizer.state_dict().items()}
        compute = engine.computer.compute

        def broken(batch: Any) -> Any:
            computed = compute(batch)
            if rank == 1:
                computed.loss = computed.loss * float("nan")
            return computed

        engine.computer.compute = broken  # type: ignore[method-assign]
        agreed = engine.compute(batch_of(0))
        assert all(torch.equal(before[n], v) for n, v in engine.state.optimizer.state_dict().items())
        return str(agreed.loss)


def test_a20_an_expert_that_one_rank_never_meets_has_a_gradient_of_zero_and_nobody_waits(ranks: RankPool) -> None:
    start = {"moe.router.bias": torch.tensor([60.0, 50.0, 0.0, 0.0])}
    spec = layout_spec("model.moe.router.gate_bias=true", dp=2)
    found = ranks.run(2, run_steps, spec, 1, 0, 6.0, start, timeout=30.0)[0]
    gradient = found.gradients[0]["layers.1.moe.w_up"]
    assert not gradient[2:].any()
    assert gradient[:2].abs().sum() > 0


@pytest.mark.slow
def test_a23_a_deep_pipeline_with_sequences_of_different_length_ends(ranks: RankPool) -> None:
    (expected,) = ranks.run(1, run_steps, layout_spec(), 1)
    found = ranks.run(4, run_steps, layout_spec(pp=4, microbatches=8), 1)[0]
    compare(found, expected)


def test_a42_blocks_of_an_interleaved_pipeline_start_pairwise_different_and_as_in_one_process(ranks: RankPool) -> None:
    (expected,) = ranks.run(1, start_weights, layout_spec())
    found = ranks.run(2, start_weights, layout_spec(pp=2, microbatches=4, schedule="interleaved_1f1b"))[0]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    queries = [found[f"layers.{i}.attention.q.weight"] for i in range(4)]
    assert all(not torch.equal(a, b) for i, a in enumerate(queries) for b in queries[i + 1 :])


def start_weights(rank: int, spec: Any) -> dict[str, torch.Tensor]:
    with join(spec.layout, rank, spec.layout.world, CPU) as mesh:
        return gather_weights(engine_of(spec, mesh))


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"dp": 4}, marks=pytest.mark.slow),
        pytest.param(
            {"dp": 2, "ep": 2, "transport": "padded", "capacity": 2.0, "microbatches": 4}, marks=pytest.mark.slow
        ),
        {"pp": 2, "microbatches": 4, "schedule": "zbv_zero_bubble"},  # weight gradients run later than their block
    ],
)
def test_gradients_added_by_the_products_are_those_of_one_process(ranks: RankPool, layout: dict[str, Any]) -> None:
    off = "passes.accumulate-gradients.enabled=false"
    (expected,) = ranks.run(1, run_steps, layout_spec(off), 2)
    compare(ranks.run(layout.get("dp", 1) * layout.get("pp", 1), run_steps, layout_spec(**layout), 2)[0], expected)


BUCKETS: dict[str, Any] = {"dp": 2, "ep": 2, "transport": "padded", "capacity": 2.0}


def test_overlapped_communication_changes_no_bit(ranks: RankPool) -> None:
    plain = ranks.run(2, run_steps, layout_spec(**BUCKETS), 2)[0]
    moved = ranks.run(2, run_steps, layout_spec("passes.overlap-communication.mode=on", **BUCKETS), 2)[0]
    for a, b in zip(plain.gradients, moved.gradients, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.slow
def test_two_runs_of_tokens_have_the_same_gradients_and_auto_records_the_times(ranks: RankPool) -> None:
    plain = ranks.run(2, run_steps, layout_spec(**BUCKETS), 2)[0]
    chunked = "passes.overlap-communication={mode: on, chunks: 2}"
    cut = ranks.run(2, run_steps, layout_spec(chunked, **BUCKETS), 2)[0]
    for a, b in zip(plain.gradients, cut.gradients, strict=True):
        assert all(float((a[name] - b[name]).norm() / a[name].norm()) < 1e-10 for name in a)
    measured = ranks.run(2, measure_overlap, layout_spec("passes.overlap-communication.mode=auto", **BUCKETS))
    assert measured[0] == measured[1]
    seconds, chosen = measured[0]
    assert seconds.keys() == {"off", "on", "on, 2 chunks"}
    assert seconds[chosen] == min(seconds.values())


def measure_overlap(rank: int, spec: Any) -> tuple[dict[str, float], str]:
    with join(spec.layout, rank, spec.layout.world, CPU) as mesh:
        engine = engine_of(spec, mesh)
        engine.decide_overlap(batch_of(0))
        return engine.overlap_seconds, engine.overlap


def test_a_lost_peer_is_named_with_what_was_being_done(ranks: RankPool, tmp_path: Path) -> None:
    """A rank that ends in the middle of a step: the other one ends too, in bounded time, and says in what."""
    pool = RankPool(2)
    said = pool.run(2, lose_a_peer, layout_spec(dp=2, ep=2, timeout=20.0), timeout=60.0)
    pool.close()
    assert said[1] == "gone"
    assert "a collective failed while" in said[0]
    assert "a peer has ended or did not answer in time" in said[0]


def lose_a_peer(rank: int, spec: Any) -> str:
    try:
        with join(spec.layout, rank, spec.layout.world, CPU) as mesh:
            engine = engine_of(spec, mesh)
            engine.compute(batch_of(0))
            if rank == 1:
                return "gone"  # leaves the groups, as a process that ends does
            engine.compute(batch_of(1))
    except RunError as failure:
        return str(failure)
    return "nothing happened"
