"""Values that no step should have, planted where they could come from: the step is skipped, nothing changes, and the
dump names the place."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moegraph.runtime.dump_step import dump_step
from moegraph.runtime.trainer import Trainer

from .small_runs import run_spec, trainer

NAN, INF, HUGE = float("nan"), float("inf"), 1e30
WEIGHTS = {
    "the input embedding": ("embedding.weight", "embedding"),
    "one expert": ("layers.2.moe.w_up", "layers.2"),
    "the router": ("layers.1.moe.router.weight", "layers.1"),
    "the last norm": ("head.norm.weight", "head"),
}
FP32 = ("precision.compute=fp32", "train.non_finite=skip", "layout.microbatches=2", "train.max_skips=100")


@pytest.fixture(scope="module")
def one(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """A run in float32 whose first step is done."""
    found = trainer(run_spec(tmp_path_factory.mktemp("planted"), *FP32, "train.steps=99"), tokens)
    found.step(1)
    return found


def state(one: Trainer) -> dict[str, torch.Tensor]:
    optimizer = one.state.optimizer.state_dict()
    return {name: value.clone() for name, value in (*optimizer.items(), *one.state.values.items())}


def skips(one: Trainer, step: int) -> str | None:
    """Why a step was skipped; it has then changed nothing."""
    before = state(one)
    record = one.step(step)
    why = record.get("skipped")
    if why is not None:
        assert all(
            torch.equal(value.nan_to_num(7.0), before[name].nan_to_num(7.0)) for name, value in state(one).items()
        )
    return why


def dumped(one: Trainer, step: int, folder: Path) -> tuple[str, dict[str, Any] | None]:
    said = dump_step(one.engine, step, one.loader.step(step - 1), {"loss": NAN}, folder)
    found: dict[str, Any] = json.loads((folder / "non_finite" / f"step-{step:06d}" / "rank-00000.json").read_text())
    first: dict[str, Any] | None = found["first"]
    assert first is None or (first["parameter"] or first["node"]) in said
    return said, first


def cases() -> list[Any]:
    every = [(where, value) for where in WEIGHTS for value in (NAN, INF, HUGE)]
    slow = [each for each in every if each not in (("one expert", INF), ("the router", HUGE))]
    return [pytest.param(*each, marks=pytest.mark.slow) if each in slow else each for each in every]


@pytest.mark.parametrize(("where", "value"), cases())
def test_in_a_weight(one: Trainer, tmp_path: Path, where: str, value: float) -> None:
    name, block = WEIGHTS[where]
    element = one.state.values[name].view(-1)[:1]  # the token that ends documents, the first expert
    kept = element.clone()
    element.fill_(value)
    why = skips(one, 2)
    try:
        if value == HUGE and why is None:
            return  # finite all the way: a step like any other
        assert why is not None
        assert why.split(" is ")[0] in ("loss", "grad_norm", "z_loss", "balance_loss")
        said, first = dumped(one, 2, tmp_path)
        if first is None:  # gradients are finite, and only the sum of their squares is not
            assert value == HUGE
            assert why == "grad_norm is inf"
            assert "every node on rank 0 is finite" in said
        elif value == HUGE:
            assert first["parameter"] is None  # the weight itself is finite: it is a node that overflows
            assert first["not_finite"] > 0
        else:
            assert (first["parameter"], first["block"]) == (name, block)
    finally:
        element.copy_(kept)
        one.policy.in_a_row = 0


def _poison(name: str, call: int, value: float) -> Callable[[Any, Any], Any]:
    """The n-th call of a graph of the head gives this loss, or a gradient of this."""
    count = 0

    def change(results: Any, port_name: str) -> Any:
        nonlocal count
        for port, tensor in results.items():
            if port.name == port_name and port.role in ("loss", "grad"):
                count += 1
                if count == call:
                    tensor.view(-1)[:1].fill_(value)
        return results

    return change


@pytest.mark.parametrize("value", [NAN, pytest.param(INF, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("graph", "name", "call"), [("forward", "loss", 2), ("backward", "norm.weight", 1)])
def test_in_the_loss_of_the_last_micro_batch_and_in_one_gradient(
    one: Trainer, monkeypatch: pytest.MonkeyPatch, graph: str, name: str, call: int, value: float
) -> None:
    bound = one.engine.executor.graphs["head"][graph]
    original, change = bound._run, _poison(name, call, value)

    def poisoned(*values: Any) -> Any:
        results = original(*values)
        return list(change(dict(zip(bound.outputs, results, strict=True)), name).values())

    monkeypatch.setattr(bound, "_run", poisoned)
    assert skips(one, 2) is not None
    one.policy.in_a_row = 0


@pytest.mark.slow
def test_a_clock_that_jumps_back_changes_nothing(tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    from .small_runs import run

    calm = run(run_spec(tmp_path / "calm", "checkpoint.every=1"), tokens)
    now = [2e9]

    def jump(*_: Any) -> float:
        now[0] -= 1e6
        return now[0]

    monkeypatch.setattr(time, "time", jump)
    jumping = run(run_spec(tmp_path / "jumping", "checkpoint.every=1"), tokens)
    assert jumping.column("loss") == calm.column("loss")
    assert min(jumping.column("seconds")) > 0
