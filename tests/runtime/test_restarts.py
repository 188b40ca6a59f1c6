"""torchrun starts the ranks again when one has died, and the run goes on by itself from its last checkpoint."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from moegraph.runtime.run_log import read_records

from .test_interrupt import wait_for
from .test_signals import _rank_process, saved, start, trained

STEPS = 24
OPTIONS = ("--set", "layout.dp=2", "--set", "checkpoint.every=4", "--set", f"train.steps={STEPS}")


@pytest.mark.slow
def test_torchrun_restarts_ranks_and_the_losses_are_those_of_a_run_that_never_stopped(
    tokens: Path, tmp_path: Path
) -> None:
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "2")
    broken, whole = tmp_path / "broken", tmp_path / "whole"
    broken.mkdir()
    whole.mkdir()
    process = start(tokens, broken, *OPTIONS, launcher=launcher)
    wait_for(process, lambda: len(saved(broken)) > 0 and trained(broken) > 5, 60)
    os.kill(_rank_process(process.pid, 1), signal.SIGKILL)
    text, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert text.count("resumed from ") == 1
    unbroken = start(tokens, whole, *OPTIONS, "--nproc", "2")
    _, errors = unbroken.communicate(timeout=120)
    assert unbroken.returncode == 0, errors
    records = [read_records(each / "run") for each in (broken, whole)]
    assert [record["step"] for record in records[0]] == list(range(1, STEPS + 1))
    losses = [[(record["loss"], record["grad_norm"]) for record in each] for each in records]
    assert losses[0] == losses[1]  # to the bit
