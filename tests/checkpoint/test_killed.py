"""`kill -9` at any instant of saving: what was complete is found, whole, and training goes on from it to the bit."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from moegraph.checkpoint.run_checkpoints import RunCheckpoints
from tests.checkpoint.forks import FIRST, Forks
from tests.checkpoint.small_checkpoints import run_spec
from tests.everyday import everyday
from tests.ranks import RankPool


def new_steps(forks: Forks, checkpoints: RunCheckpoints) -> None:
    """Three more steps, each saved; old ones are removed."""
    forks.train(checkpoints, FIRST + 1, FIRST + 3)


def same_step(forks: Forks, checkpoints: RunCheckpoints) -> None:
    """The step that is there already, saved again and again."""
    for _ in range(3):
        checkpoints.save(FIRST, forks.record, forks.trainer.expert_counts)
    checkpoints.finish()


def one_step(forks: Forks, checkpoints: RunCheckpoints) -> None:
    forks.train(checkpoints, FIRST + 1, FIRST + 1)


def same_step_once(forks: Forks, checkpoints: RunCheckpoints) -> None:
    checkpoints.save(FIRST, forks.record, forks.trainer.expert_counts)
    checkpoints.finish()


BODIES = {"new": new_steps, "existing": same_step}
ONCE = {"new": one_step, "existing": same_step_once}


def kill_at_random(rank: int, folder: Path, base: Path, mode: str, which: str, times: int) -> list[int]:
    """The steps that were gone on from after each kill."""
    forks = Forks(run_spec(folder, f"checkpoint.mode={mode}", "checkpoint.keep_last=2", "train.steps=9"), base, folder)
    body, chance = BODIES[which], random.Random(f"{mode} {which}")
    seconds = min(forks.seconds(body) for _ in range(2))
    copies: list[Any] = []
    while len(copies) < times:
        copy = forks.killed(body, after=chance.uniform(0, seconds))
        if copy is None:  # it had ended: nothing was killed
            seconds *= 0.8
        else:
            copies.append(copy)
    return [forks.check(copy) for copy in copies]


def kill_before_each_change(rank: int, folder: Path, base: Path, mode: str, which: str) -> list[int]:
    forks = Forks(run_spec(folder, f"checkpoint.mode={mode}", "checkpoint.keep_last=1", "train.steps=9"), base, folder)
    found = []
    for change in range(200):
        copy = forks.killed(ONCE[which], before_change=change)
        if copy is None:
            return found
        found.append(forks.check(copy))
    raise AssertionError("it never came to its end")


@pytest.mark.parametrize(("mode", "which"), everyday(itertools.product(["sync", "async"], BODIES), every=3))
def test_killed_at_random_instants(ranks: RankPool, tokens: Path, tmp_path: Path, mode: str, which: str) -> None:
    """A27: nothing is removed or pointed at before what replaces it is whole."""
    (steps,) = ranks.run(1, kill_at_random, tmp_path, tokens, mode, which, 5)
    assert len(steps) == 5
    assert all(FIRST <= step <= FIRST + 3 for step in steps)


@pytest.mark.slow
@pytest.mark.parametrize("which", BODIES)
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_killed_at_many_random_instants(ranks: RankPool, tokens: Path, tmp_path: Path, mode: str, which: str) -> None:
    (steps,) = ranks.run(1, kill_at_random, tmp_path, tokens, mode, which, 30, timeout=220)
    assert len(set(steps)) > 1 or which == "existing"


@pytest.mark.parametrize("which", BODIES)
@pytest.mark.parametrize("mode", ["sync", pytest.param("async", marks=pytest.mark.slow)])
def test_killed_before_each_change_on_disk(
    ranks: RankPool, tokens: Path, tmp_path: Path, mode: str, which: str
) -> None:
    (steps,) = ranks.run(1, kill_before_each_change, tmp_path, tokens, mode, which)
    assert len(steps) > 6
    assert steps == sorted(steps)  # once the new step is there, it stays
    assert set(steps) == ({FIRST, FIRST + 1} if which == "new" else {FIRST})
