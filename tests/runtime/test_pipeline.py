"""torch's pipeline schedules over callbacks compute what the unpipelined model does.

Two gloo processes run every case once (`_worker`) and save what came out; the tests read it.
"""

from __future__ import annotations

import datetime
import functools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from moegraph.runtime.pipeline import Pipeline

RANKS, T, D, STEPS, BATCHES = 2, 5, 3, 3, 3
FULL_BACKWARD = ("gpipe", "1f1b", "interleaved_1f1b")
SPLIT_BACKWARD = ("interleaved_zero_bubble", "zbv_zero_bubble", "dual_pipe_v")
CASES = [(schedule, microbatches) for schedule in (*FULL_BACKWARD, *SPLIT_BACKWARD) for microbatches in (4, 8)]
ONE_FAILS = ("1f1b", "zbv_zero_bubble")


class TanhStages:
    """tanh(x @ weight) per stage and the sum of squares against a target, gradients written out, all in float64."""

    def __init__(self, stages: int, microbatches: int, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        self.last = stages - 1
        self.weights = torch.randn(stages, D, D, dtype=torch.float64, generator=random)
        self.inputs, self.targets = torch.randn(2, microbatches, T, D, dtype=torch.float64, generator=random)
        self.saved: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.losses: list[Tensor] = []
        self.gradients: dict[int, Tensor] = {}
        self.order: dict[int, list[int]] = {}
        self.live = self.most_live = self.most_held = 0
        self.fail_at: tuple[str, int, int] | None = None
        self.held: Callable[[], int] = lambda: 0

    def apply(self, stage: int, microbatch: int, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
        x = self.inputs[microbatch] if hidden is None else hidden
        return x, torch.tanh(x @ self.weights[stage])

    def loss(self, y: Tensor, microbatch: int) -> Tensor:
        return (y - self.targets[microbatch]).square().sum()

    def evaluate(self, stage: int, batch: int, hidden: Tensor | None) -> Tensor:
        self.maybe_fail("evaluate", stage, batch)
        _, y = self.apply(stage, batch, hidden)
        return self.loss(y, batch) if stage == self.last else y

    def forward(self, stage: int, microbatch: int, hidden: Tensor | None) -> Tensor:
        self.maybe_fail("forward", stage, microbatch)
        assert (hidden is None) == (stage == 0)
        assert not torch.is_grad_enabled()
        self.saved[stage, microbatch] = self.apply(stage, microbatch, hidden)
        y = self.saved[stage, microbatch][1]
        if stage < self.last:
            return y
        self.losses.append(self.loss(y, microbatch))
        return self.losses[-1]

    def backward(
        self, stage: int, microbatch: int, grad: Tensor | None, split: bool
    ) -> tuple[Tensor | None, Callable[[], None]]:
        self.maybe_fail("backward", stage, microbatch)
        assert (grad is None) == (stage == self.last)
        self.most_held = max(self.most_held, self.held())
        x, y = self.saved.pop((stage, microbatch))
        before_tanh = (2 * (y - self.targets[microbatch]) if grad is None else grad) * (1 - y * y)
        below = before_tanh @ self.weights[stage].T if stage else None

        def weight_gradient() -> None:
            self.order.setdefault(stage, []).append(microbatch)
            gradient = x.T @ before_tanh
            self.gradients[stage] = self.gradients[stage] + gradient if stage in self.gradients else gradient

        def later() -> None:
            self.live -= 1
            weight_gradient()

        if not split:
            weight_gradient()
            return below, lambda: None
        self.live += 1
        self.most_live = max(self.most_live, self.live)
        return below, later

    def maybe_fail(self, what: str, stage: int, microbatch: int) -> None:
        if self.fail_at == (what, stage, microbatch):
            raise LookupError(f"{what} {stage} {microbatch} failed on purpose")
        if self.fail_at == ("shape", stage, microbatch) and what == "backward":
            self.weights = self.weights[:, :2]

    def result(self) -> dict[str, Any]:
        return {"losses": self.losses, "gradients": self.gradients, "order": self.order, "live": self.live}


@torch.no_grad()
def unpipelined(stages: int, microbatches: int, seed: int) -> TanhStages:
    """The same arithmetic, one micro-batch after the other."""
    work = TanhStages(stages, microbatches, seed)
    for microbatch in range(microbatches):
        hidden: Tensor | None = None
        for stage in range(stages):
            hidden = work.forward(stage, microbatch, hidden)
        grad: Tensor | None = None
        for stage in reversed(range(stages)):
            grad, _ = work.backward(stage, microbatch, grad, split=False)
    return work


def v_shaped(schedule: str) -> bool:
    return schedule in ("zbv_zero_bubble", "dual_pipe_v")


def stages_of(schedule: str) -> int:
    return RANKS if schedule in ("gpipe", "1f1b") else 2 * RANKS


def make(schedule: str, microbatches: int, seed: int, **changes: Any) -> tuple[Pipeline, TanhStages]:
    """This rank's pipeline and its work."""
    stages, group = changes.pop("stages", stages_of(schedule)), changes.get("group")
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    second = 2 * ranks - 1 - rank if v_shaped(schedule) else rank + ranks
    work = TanhStages(stages, microbatches, seed)
    options: dict[str, Any] = {"my_stages": [rank, second][: stages // ranks], "group": None, **changes}
    pipeline = Pipeline(
        schedule=schedule, stages_total=stages, microbatches=microbatches, hidden=((T, D), torch.float64),
        device=torch.device("cpu"), work=work, **options,
    )  # fmt: skip
    return pipeline, work


def restart(pipeline: Pipeline, stages: int, microbatches: int, seed: int) -> TanhStages:
    """Other work for the next step of a pipeline."""
    work = TanhStages(stages, microbatches, seed)
    pipeline._work = work
    work.held = lambda: held_by(pipeline)
    return work


def held_by(pipeline: Pipeline) -> int:
    """How many hidden states and gradients torch's stages hold."""
    tensors: list[Any] = []
    for stage in pipeline._stages:
        received = (*stage.args_recv_info.values(), *stage.grad_recv_info.values())
        tensors += [getattr(info, "buffer", None) for infos in received for info in infos]
        tensors += [each for outputs, inputs in stage.fwd_cache.values() for each in (*outputs, *inputs)]
        tensors += [each for gradients in stage.bwd_cache.values() for each in gradients]
    return sum(each.numel() == T * D for each in tensors if isinstance(each, Tensor))


def run_case(schedule: str, microbatches: int) -> dict[str, Any]:
    pipeline, work = make(schedule, microbatches, 0)
    steps, evaluations, most_live, most_held = [], [], 0, 0
    for step in range(STEPS):
        work = restart(pipeline, stages_of(schedule), microbatches, step)
        pipeline.step()
        steps.append(work.result())
        most_live, most_held = max(most_live, work.most_live), max(most_held, work.most_held)
        evaluations.append(pipeline.evaluate((0, 1, BATCHES)[step], work.evaluate))
    return {"steps": steps, "evaluations": evaluations, "most_live": most_live, "most_held": most_held}


def error_of(call: Callable[[], object]) -> tuple[str, str, list[str]]:
    """(kind, text, notes) of what a call raises."""
    try:
        call()
    except Exception as error:
        wrapped = ["after torch's own"] if isinstance(error, LookupError) and error.__context__ is not None else []
        return type(error).__name__, str(error), [*getattr(error, "__notes__", []), *wrapped]
    return "", "", []


def run_failures_everywhere(schedule: str) -> dict[str, Any]:
    """Both ranks fail, with messages under way; then the last action of one; then one of an evaluation; then none."""
    pipeline, work = make(schedule, 4, 0, group=dist.new_group([0, 1]))
    rank, errors = dist.get_rank(), []
    ahead = 1 if schedule in ("1f1b", "interleaved_1f1b", "interleaved_zero_bubble") else 2
    last = stages_of(schedule) - 1
    places = {"forward": [(0, ahead), (1, 0)], "backward": [(0, 3), None], "evaluate": [None, None]}
    places["evaluate"][pipeline.owner(last)] = (last, 3)
    for what, place in ((what, each[rank]) for what, each in places.items()):
        work = restart(pipeline, stages_of(schedule), 4, 1)
        work.fail_at = None if place is None else (what, *place)
        run = functools.partial(pipeline.evaluate, 4, work.evaluate) if what == "evaluate" else pipeline.step
        errors.append(error_of(run))
    work = restart(pipeline, stages_of(schedule), 4, 2)
    pipeline.step()
    return {"errors": errors, **work.result()}


def run_failure_of_one(schedule: str) -> dict[str, Any]:
    """Rank 1 fails in a backward; rank 0 waits for it no longer than the group's timeout."""
    group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=2))
    pipeline, work = make(schedule, 4, 0, group=group)
    if dist.get_rank() == 1:
        work.fail_at = ("shape" if schedule == "zbv_zero_bubble" else "backward", 1, 1)
    start = time.monotonic()
    return {"error": error_of(pipeline.step), "seconds": time.monotonic() - start}


def run_refusals() -> list[tuple[str, str, list[str]]]:
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("2f2b", {}), ("zbv_zero_bubble", {"my_stages": [dist.get_rank(), dist.get_rank() + 2]}),
        ("gpipe", {"stages": 4}), ("dual_pipe_v", {}),
    ]  # fmt: skip
    return [error_of(lambda s=s, c=c: make(s, 2, 0, **c)) for s, c in wrong]


def run_alone() -> list[dict[str, Any]]:
    """Pipelines of one stage, each rank its own group; in the second one rank 1 is rank 0."""
    groups = [dist.new_group([rank]) for rank in range(RANKS)]
    results = []
    for schedule in ("gpipe", "1f1b"):
        pipeline, work = make(schedule, 4, 7, stages=1, group=groups[dist.get_rank()])
        pipeline.step()
        results.append({"evaluation": pipeline.evaluate(2, work.evaluate), **work.result()})
    return results


def _worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", f"file://{folder}/store", timeout=timeout, rank=rank, world_size=RANKS)
    results: dict[Any, Any] = {case: run_case(*case) for case in CASES}
    results["failures"] = {
        schedule: run_failures_everywhere(schedule) for schedule in (*FULL_BACKWARD, *SPLIT_BACKWARD)
    }
    results["refusals"] = run_refusals()
    results["alone"] = run_alone()
    results["one fails"] = {schedule: run_failure_of_one(schedule) for schedule in ONE_FAILS}
    torch.save(results, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    """What each rank saved."""
    folder = tmp_path_factory.mktemp("pipeline")
    running = mp.spawn(_worker, (str(folder),), nprocs=RANKS, join=False)
    end = time.monotonic() + 120
    try:
        while not running.join(timeout=1):
            assert time.monotonic() < end, "the ranks hang"
    finally:
        for process in running.processes:
            process.kill()
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]


def of_all_ranks(results: list[dict[str, Any]]) -> tuple[list[Tensor], dict[int, Tensor], dict[int, list[int]]]:
    """Losses, gradients and orders of a step, from the ranks that have them."""
    losses = [loss for each in results for loss in each["losses"]]
    gradients = {stage: value for each in results for stage, value in each["gradients"].items()}
    return losses, gradients, {stage: value for each in results for stage, value in each["order"].items()}


def assert_unpipelined(results: list[dict[str, Any]], stages: int, microbatches: int, seed: int) -> None:
    """Losses and gradients are bitwise those of one micro-batch after the other, and autograd's to 1e-12."""
    losses, gradients, order = of_all_ranks(results)
    expected = unpipelined(stages, microbatches, seed)
    torch.testing.assert_close(losses, expected.losses, rtol=0, atol=0)
    torch.testing.assert_close(gradients, expected.gradients, rtol=0, atol=0)
    assert order == {stage: list(range(microbatches)) for stage in range(stages)}
    weights = expected.weights.clone().requires_grad_()
    hidden = expected.inputs
    for stage in range(stages):
        hidden = torch.tanh(hidden @ weights[stage])
    (hidden - expected.targets).square().sum().backward()
    assert weights.grad is not None
    torch.testing.assert_close(
        torch.stack([gradients[stage] for stage in range(stages)]), weights.grad, rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize(("schedule", "microbatches"), CASES)
def test_three_steps_are_bitwise_those_of_the_unpipelined_model(
    schedule: str, microbatches: int, ranks: list[dict[Any, Any]]
) -> None:
    for step in range(STEPS):
        results = [each[schedule, microbatches]["steps"][step] for each in ranks]
        assert_unpipelined(results, stages_of(schedule), microbatches, seed=step)


@pytest.mark.parametrize(("schedule", "microbatches"), CASES)
def test_weight_gradients_wait_only_where_the_schedule_splits_the_backward(
    schedule: str, microbatches: int, ranks: list[dict[Any, Any]]
) -> None:
    for each in ranks:
        case = each[schedule, microbatches]
        assert (case["most_live"] > 0) == (schedule in SPLIT_BACKWARD)
        assert [step["live"] for step in case["steps"]] == [0] * STEPS


@pytest.mark.parametrize(("schedule", "microbatches"), CASES)
def test_no_hidden_state_is_kept_for_the_backward(
    schedule: str, microbatches: int, ranks: list[dict[Any, Any]]
) -> None:
    """At a backward there is its gradient, and what was received or is to be sent at the same time."""
    for each in ranks:
        assert each[schedule, microbatches]["most_held"] <= (1 if schedule in ("gpipe", "1f1b") else 3)


@pytest.mark.parametrize(("schedule", "microbatches"), CASES)
def test_evaluation_gives_the_unpipelined_losses_to_the_owner_of_the_last_stage(
    schedule: str, microbatches: int, ranks: list[dict[Any, Any]]
) -> None:
    owner = 0 if v_shaped(schedule) else 1
    for rank, each in enumerate(ranks):
        evaluations = each[schedule, microbatches]["evaluations"]
        expected = [unpipelined(stages_of(schedule), microbatches, seed).losses[:n] for seed, n in enumerate((0, 1, 3))]
        assert evaluations == (expected if rank == owner else [[]] * STEPS)


@pytest.mark.parametrize("schedule", [*FULL_BACKWARD, *SPLIT_BACKWARD])
def test_a_step_after_failed_ones_is_as_good_as_new(schedule: str, ranks: list[dict[Any, Any]]) -> None:
    results = [each["failures"][schedule] for each in ranks]
    ahead, last = results[0]["errors"][0][1].split()[2], stages_of(schedule) - 1

    def failed(what: str, where: str, stage: int, microbatch: int | str) -> tuple[str, str, list[str]]:
        note = f"in the {where} of pipeline stage {stage}, micro-batch {microbatch}"
        return "LookupError", f"{what} {stage} {microbatch} failed on purpose", [note]

    fine, evaluation = ("", "", []), failed("evaluate", "evaluation", last, 3)
    both = [failed("forward", "forward", 0, ahead), failed("forward", "forward", 1, 0)]
    assert [each["errors"][0] for each in results] == both
    assert [each["errors"][1] for each in results] == [failed("backward", "backward", 0, 3), fine]
    assert [each["errors"][2] for each in results] == ([evaluation, fine] if v_shaped(schedule) else [fine, evaluation])
    assert_unpipelined(results, stages_of(schedule), 4, seed=2)


@pytest.mark.parametrize("schedule", ONE_FAILS)
def test_when_one_rank_fails_it_says_why_and_the_other_waits_for_the_timeout_at_most(
    schedule: str, ranks: list[dict[Any, Any]]
) -> None:
    waited, failed = (each["one fails"][schedule] for each in ranks)
    kind, text, notes = failed["error"]
    assert notes == ["in the backward of pipeline stage 1, micro-batch 1"]
    if schedule == "zbv_zero_bubble":
        assert kind == "AssertionError"
        assert "a stage returned ((5, 2), torch.float64), not ((5, 3), torch.float64)" in text
    else:
        assert (kind, text) == ("LookupError", "backward 1 1 failed on purpose")
    assert waited["error"][0] == "RuntimeError"
    assert waited["seconds"] < 10


def test_what_cannot_run_is_refused(ranks: list[dict[Any, Any]]) -> None:
    for rank, each in enumerate(ranks):
        assert {kind for kind, _, _ in each["refusals"]} == {"ValueError"}
        unknown, misplaced, several, few = [text for _, text, _ in each["refusals"]]
        assert unknown.startswith("there is no pipeline schedule '2f2b'; there are gpipe, 1f1b, ")
        stages, mine = f"[{rank}, {3 - rank}]", f"[{rank}, {rank + 2}]"
        assert misplaced.endswith(f"gives rank {rank} the stages {stages}; it was to own {mine}")
        assert several.startswith("gpipe over 2 ranks and 4 stages")
        assert "at least as many microbatches as stages" in few


def test_a_pipeline_of_one_stage_runs_alone_in_its_group(ranks: list[dict[Any, Any]]) -> None:
    expected = unpipelined(1, 4, 7)
    for each in ranks:
        for result in each["alone"]:
            assert_unpipelined([result], 1, 4, seed=7)
            assert result["evaluation"] == expected.losses[:2]
