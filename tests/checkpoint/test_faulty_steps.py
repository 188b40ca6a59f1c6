"""Steps that are not accepted, and replicas that come apart, with several ranks: all of them decide the same."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moegraph.errors import CheckFailed, RunError
from moegraph.runtime.mesh import join
from moegraph.runtime.progress import Progress
from moegraph.runtime.run_log import read_records
from moegraph.runtime.trainer import Trainer
from moegraph.specs.schema import Spec
from tests.ranks import RankPool

from .small_checkpoints import CPU, compiled_for, run_spec

NAN = float("nan")


def state_of(trainer: Trainer) -> dict[str, Tensor]:
    """Masters, moments, biases, and what the graphs read."""
    optimizer = {name: value.clone() for name, value in trainer.state.optimizer.state_dict().items()}
    return {**optimizer, **{f"value.{name}": value.clone() for name, value in trainer.state.values.items()}}


def trains(rank: int, spec: Spec, base: Path, break_: Callable[[Trainer, int, Any], None]) -> dict[str, Any]:
    """Trains as one rank; `break_` is called after the compute phase of each step with what it computed. Returns the
    error, if any, and for each step whether it left the whole state as it was."""
    states: list[dict[str, Tensor]] = []
    with join(spec.layout, rank, spec.layout.world, CPU) as mesh:
        trainer = Trainer(spec, base, CPU, Progress(spec.train.steps, stream=io.StringIO()), compiled_for(spec), mesh)
        compute = trainer.computer.compute

        def broken(batch: Any) -> Any:
            states.append(state_of(trainer))
            computed = compute(batch)
            break_(trainer, len(states), computed)
            return computed

        trainer.computer.compute = broken  # type: ignore[method-assign]
        error = None
        try:
            trainer.run()
        except (RunError, CheckFailed) as caught:
            error = f"{caught.exit_code} {caught}"
        states.append(state_of(trainer))
    same = [all(torch.equal(a[name], b[name]) for name in a) for a, b in pairwise(states)]
    biases = trainer.state.bias_names
    return {
        "error": error,
        "same": same,
        "skipped": trainer.policy.skipped,
        "biases": len(biases),
        "optimizer_steps": trainer.state.optimizer.steps,
    }


def loss_is_nan(trainer: Trainer, step: int, computed: Any) -> None:
    if step == 2 and trainer.mesh.rank == trainer.mesh.world - 1:
        computed.loss = computed.loss * NAN


def gradient_is_infinite(trainer: Trainer, step: int, computed: Any) -> None:
    if step == 2 and trainer.mesh.rank == trainer.mesh.world - 1:
        next(iter(trainer.gradients.shard.values())).view(-1)[0] = float("inf")


def always_nan(trainer: Trainer, step: int, computed: Any) -> None:
    if trainer.mesh.rank == 0:
        computed.loss = computed.loss * NAN


def spike(trainer: Trainer, step: int, computed: Any) -> None:
    if step == 5 and trainer.mesh.rank == trainer.mesh.world - 1:
        computed.loss = computed.loss + 100.0


@pytest.mark.parametrize(
    ("layout", "break_"),
    [
        pytest.param({"dp": 2}, loss_is_nan, id="dp-loss"),
        pytest.param({"dp": 2}, gradient_is_infinite, id="dp-gradient", marks=pytest.mark.slow),
        pytest.param({"dp": 2, "ep": 2}, loss_is_nan, id="ep-loss", marks=pytest.mark.slow),
        pytest.param({"dp": 2, "ep": 2}, gradient_is_infinite, id="ep-gradient"),
    ],
)
def test_a17_nan_on_one_rank_is_skipped_by_all_and_changes_nothing(
    ranks: RankPool, tokens: Path, tmp_path: Path, break_: Any, layout: dict[str, int]
) -> None:
    """ecmwf WeatherGenerator#2718."""
    spec = run_spec(tmp_path, "train.non_finite=skip", "train.steps=3", **layout)
    results = ranks.run(2, trains, spec, tokens, break_)
    for each in results:
        assert each["error"] is None
        assert each["same"] == [False, True, False]  # bitwise: masters, moments, biases, weights
        assert each["biases"] > 0
        assert (each["skipped"], each["optimizer_steps"]) == (1, 2)
    records = read_records(tmp_path / "run")
    assert [each["skipped_steps"] for each in records] == [0, 1, 1]
    assert records[1]["skipped"] in ("loss is nan", "grad_norm is inf")
    manifest = json.loads((tmp_path / "run" / "checkpoints" / "step-000002" / "manifest.json").read_text())
    assert (manifest["counters"]["skipped_steps"], manifest["counters"]["skipped_in_a_row"]) == (1, 1)


def test_a_run_goes_on_after_a_skipped_step_as_if_it_had_not_stopped(
    ranks: RankPool, tokens: Path, tmp_path: Path
) -> None:
    options = ("train.non_finite=skip", "train.skip_spikes={window: 4}")
    spec = run_spec(tmp_path, *options, "train.steps=4", dp=2)
    ranks.run(2, trains, spec, tokens, loss_is_nan)
    whole = [each["loss"] for each in read_records(tmp_path / "run")]
    again = run_spec(
        tmp_path,
        *options,
        "train.steps=4",
        f"checkpoint.resume={tmp_path / 'run' / 'checkpoints' / 'step-000002'}",
        f"train.output_dir={tmp_path / 'again'}",
        dp=2,
    )
    results = ranks.run(2, trains, again, tokens, spike)
    records = read_records(tmp_path / "again")
    assert [each["loss"] for each in records] == whole[2:]
    assert [each["skipped_steps"] for each in records] == [1, 1]
    assert [each["skipped"] for each in results] == [1, 1]


def test_too_many_skips_in_a_row_stop_all_ranks(ranks: RankPool, tokens: Path, tmp_path: Path) -> None:
    spec = run_spec(tmp_path, "train.non_finite=skip", "train.max_skips=2", "train.steps=9", dp=2)
    for each in ranks.run(2, trains, spec, tokens, always_nan):
        assert "step 3: loss is nan, and 3 steps in a row were skipped, more than train.max_skips" in each["error"]
        assert each["same"] == [True, True, True]


def test_a_spike_is_skipped_by_all_ranks(ranks: RankPool, tokens: Path, tmp_path: Path) -> None:
    spec = run_spec(tmp_path, "train.skip_spikes={window: 8, deviations: 6}", "train.steps=6", dp=2)
    for each in ranks.run(2, trains, spec, tokens, spike):
        assert each["error"] is None
        assert each["same"] == [False] * 4 + [True, False]
    assert read_records(tmp_path / "run")[4]["skipped"].startswith("loss is ")


def test_without_the_policy_it_stops_everywhere(ranks: RankPool, tokens: Path, tmp_path: Path) -> None:
    for each in ranks.run(2, trains, run_spec(tmp_path, "train.steps=3", dp=2), tokens, loss_is_nan):
        assert each["error"].startswith("1 step 2: loss is nan; the model is as it was after step 1")
        assert each["same"] == [False, True]


def weight_is_nan(trainer: Trainer, step: int, computed: Any) -> None:
    if step == 1 and trainer.mesh.rank == 1:
        commit = trainer.state.commit

        def commit_then_break(*arguments: Any) -> None:
            commit(*arguments)
            trainer.state.values[_first_experts(trainer)].view(-1)[5] = NAN

        trainer.state.commit = commit_then_break  # type: ignore[method-assign]


def _first_experts(trainer: Trainer) -> str:
    return next(name for name in sorted(trainer.state.values) if name.endswith("moe.w_up"))


def test_a_dump_names_parameter_block_and_rank(ranks: RankPool, tokens: Path, tmp_path: Path) -> None:
    spec = run_spec(tmp_path, "train.non_finite=dump", "train.steps=3", dp=2)
    first, second = ranks.run(2, trains, spec, tokens, weight_is_nan)
    assert "every node on rank 0 is finite" in first["error"]
    assert "on rank 1 the first that is not finite is layers.1.moe.w_up in layers.1 (moe/forward)" in second["error"]
    folder = tmp_path / "run" / "non_finite" / "step-000002"
    dumps = [json.loads((folder / f"rank-{rank:05d}.json").read_text()) for rank in range(2)]
    assert [each["first"] is None for each in dumps] == [True, False]
    assert dumps[1]["parameters"] == {"layers.1.moe.w_up": 1}
    assert dumps[1]["numbers"]["loss"] == "nan"
    assert sum(len(share) for each in dumps for share in each["samples"]) == spec.train.tokens_per_step // 6
    assert not set(dumps[0]["samples"][0]) & set(dumps[1]["samples"][0])


@pytest.mark.slow
def test_a_dump_of_a_pipeline(ranks: RankPool, tokens: Path, tmp_path: Path) -> None:
    layout: dict[str, Any] = {"pp": 2, "microbatches": 4, "schedule": "interleaved_zero_bubble"}
    spec = run_spec(tmp_path, "train.non_finite=dump", "train.steps=3", **layout)
    errors = [each["error"] for each in ranks.run(2, trains, spec, tokens, weight_is_nan)]
    assert "on rank 1 the first that is not finite is layers." in errors[1]
    assert "moe.w_up in layers." in errors[1]


WEIGHT, BIAS = "layers.1.moe.w_up", "layers.2.moe.select_bias"


def flip_in_weight(trainer: Trainer, step: int, computed: Any) -> None:
    _flip(trainer, step, WEIGHT)


def flip_in_bias(trainer: Trainer, step: int, computed: Any) -> None:
    _flip(trainer, step, BIAS)


def _flip(trainer: Trainer, step: int, name: str) -> None:
    """The lowest bit of one element, on rank 1, after the second step."""
    if step != 2 or trainer.mesh.rank != 1:
        return
    commit = trainer.state.commit

    def commit_then_flip(*arguments: Any) -> None:
        commit(*arguments)
        trainer.state.values[name].view(-1).view(torch.uint8)[0] ^= 1

    trainer.state.commit = commit_then_flip  # type: ignore[method-assign]


@pytest.mark.parametrize("dp", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("flip", "name"), [(flip_in_weight, WEIGHT), (flip_in_bias, BIAS)], ids=["weight", "bias"])
def test_a_flipped_bit_in_one_replica_is_found_and_named(
    ranks: RankPool, tokens: Path, tmp_path: Path, flip: Any, name: str, dp: int
) -> None:
    spec = run_spec(tmp_path, "train.check_replicas=1", "train.steps=4", dp=dp)
    for each in ranks.run(dp, trains, spec, tokens, flip):
        assert f"3 step 2: replicas have come apart: {name} on rank 1 is not that of the others" in each["error"]
    assert not (tmp_path / "run" / "checkpoints" / "step-000002").exists()


@pytest.mark.slow
def test_replicas_that_agree_are_left_alone(ranks: RankPool, tokens: Path, tmp_path: Path) -> None:
    spec = run_spec(tmp_path, "train.check_replicas=1", "train.steps=2", dp=4, ep=2)
    assert [each["error"] for each in ranks.run(4, trains, spec, tokens, spike)] == [None] * 4
