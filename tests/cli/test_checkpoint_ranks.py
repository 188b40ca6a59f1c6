"""Several processes that are all killed while they save: the same command goes on, under another layout too."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from moegraph.checkpoint.reader import Checkpoint
from moegraph.checkpoint.step_folders import complete_steps

from .conftest import SMALL
from .test_train import prepare_tokens


def start(folder: str, steps: int, mode: str, *layout: str) -> subprocess.Popen[bytes]:
    given = [f"train.output_dir=runs/{folder}", f"train.steps={steps}", f"checkpoint={{every: 1, mode: {mode}}}"]
    sets = [part for each in (*given, *layout) for part in ("--set", each)]
    world = "2" if layout else "1"
    command = [sys.executable, "-m", "moegraph", "train", "--set", "precision.compute=fp64", *sets, "--nproc", world]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)


def losses(folder: str) -> dict[int, float]:
    lines = Path("runs", folder, "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return {record["step"]: record["loss"] for record in map(json.loads, lines)}


def processes_of(launcher: int) -> list[int]:
    """The launcher and the ranks, which are its children."""
    found = [launcher]
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            if int((entry / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1]) == launcher:
                found.append(int(entry.name))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("seed", [1])
def test_all_ranks_are_killed_while_they_save(here: Path, mode: str, seed: int) -> None:
    (here / "moegraph.yaml").write_text(SMALL, encoding="utf-8")
    prepare_tokens(here / "tokens")
    chance = random.Random(f"{mode} {seed}")
    killed = start("killed", 100_000, mode, "layout.dp=2", "layout.ep=2")
    root = here / "runs" / "killed" / "checkpoints"
    end = time.monotonic() + 90
    while len(complete_steps(root)) < 3:
        assert killed.poll() is None, killed.communicate()
        assert time.monotonic() < end
        time.sleep(0.01)
    time.sleep(chance.uniform(0, 0.2))
    for process in processes_of(killed.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    killed.communicate()
    steps = complete_steps(root)
    for path in steps.values():
        Checkpoint.open(path).verify()
    last = max(steps) + 2
    for folder, layout in (("killed", ("layout.dp=2", "layout.ep=2")), ("whole", ())):
        process = start(folder, last, mode, *layout)
        _, err = process.communicate(timeout=90)
        assert process.returncode == 0, err
    found, right = losses("killed"), losses("whole")
    assert [found[step] for step in range(1, last + 1)] == pytest.approx(
        [right[s] for s in range(1, last + 1)], rel=1e-10
    )
    process = start("killed", last + 1, mode)  # and under a layout of one rank
    _, err = process.communicate(timeout=90)
    assert process.returncode == 0, err
    assert max(losses("killed")) == last + 1
