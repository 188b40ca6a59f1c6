"""`moegraph train` with several processes: the same training, one voice, and an end in bounded time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .conftest import SMALL, Moegraph
from .test_train import prepare_tokens

LAYOUT = ["--set", "layout.ep=2", "--set", "layout.transport=padded", "--set", "precision.compute=fp64"]


@pytest.fixture
def place(here: Path) -> Path:
    (here / "moegraph.yaml").write_text(SMALL, encoding="utf-8")
    prepare_tokens(here / "tokens")
    return here


def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "moegraph", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def losses(folder: str) -> list[float]:
    lines = Path(folder, "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["loss"] for line in lines]


def test_two_processes_train_like_one_and_rank_0_alone_speaks(place: Path, moegraph: Moegraph) -> None:
    more = ["--set", "train.steps=3", "--set", "train.output_dir=runs/two"]
    process = start("train", *LAYOUT, *more, "--nproc", "2", "--json")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    result = json.loads(out)
    assert result["steps"] == 3
    assert err.count("step 3/3") == 1
    one = moegraph("train", "--set", "precision.compute=fp64", "--set", "train.steps=3", "--json")
    assert one.status == 0, one.err
    assert losses("runs/two") == pytest.approx(losses("runs/small"), rel=1e-12)
    assert result["loss"] == pytest.approx(one.json["loss"], rel=1e-12)
    assert "layout: 2 ranks = dp 2 × pp 1, ep 2, padded transport" in err
    whole, parts = Path("runs/small/model.safetensors"), Path("runs/two/model.safetensors")
    assert abs(whole.stat().st_size - parts.stat().st_size) < 4096


def test_a_rank_that_is_killed_ends_all_in_bounded_time_and_is_named(place: Path) -> None:
    process = start("train", *LAYOUT, "--set", "train.steps=100000", "--set", "train.log_every=1", "--nproc", "2")
    assert process.stdout is not None
    assert process.stderr is not None
    for line in process.stdout:
        if line.startswith("step 2/"):
            break
    os.kill(rank_of(process.pid, 1), signal.SIGKILL)
    began = time.monotonic()
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(60) == 1
    assert time.monotonic() - began < 40
    assert "error: rank 1 was killed by SIGKILL" in err
    assert "rank 0, step " in err
    assert "a collective failed while" in err


def rank_of(launcher: int, rank: int) -> int:
    """The process of a rank, found among the launcher's children."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            environment = (entry / "environ").read_bytes().split(b"\0")
        except (OSError, IndexError):
            continue
        if parent == launcher and f"RANK={rank}".encode() in environment:
            return int(entry.name)
    raise AssertionError(f"no process of rank {rank}")


@pytest.mark.slow
def test_a_spec_that_one_rank_cannot_read_its_data_for_ends_both_with_one_reason(place: Path) -> None:
    process = start("train", *LAYOUT, "--set", "data.source=nowhere", "--nproc", "2")
    _, err = process.communicate(timeout=60)
    assert process.returncode in (1, 2)
    assert "nowhere" in err
    assert "Traceback" not in err


def test_a_world_of_another_size_than_the_layout_is_refused(place: Path) -> None:
    process = start("train", *LAYOUT, RANK="0", WORLD_SIZE="4", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "layout asks for 2 ranks (dp 2 × pp 1), and 4 processes run" in err


@pytest.mark.slow
def test_a_rank_that_stands_still_ends_all_within_the_timeout(place: Path) -> None:
    """It is neither dead nor alive: SIGTERM does not reach it."""
    more = ["train.steps=100000", "train.log_every=1", "layout.timeout=5"]
    process = start("train", *LAYOUT, *(part for each in more for part in ("--set", each)), "--nproc", "2")
    assert process.stdout is not None
    assert process.stderr is not None
    for line in process.stdout:
        if line.startswith("step 2/"):
            break
    stopped = rank_of(process.pid, 1)
    os.kill(stopped, signal.SIGSTOP)
    began = time.monotonic()
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(60) == 1
    assert time.monotonic() - began < 60
    assert "rank 0, step " in err
    assert "a peer has ended or did not answer in time" in err
    assert not Path(f"/proc/{stopped}").exists()  # no orphan


@pytest.mark.slow
def test_a_step_of_two_ranks_is_traced_and_compared_with_itself(place: Path) -> None:
    more = ["--set", "train.steps=3", "--set", "checkpoint.every=2"]
    for arguments, says in (
        (["train", *LAYOUT, *more], "results: runs/small"),
        (["inspect", "runs/small", "--trace-hash", "--step", "3", "--save", "trace.json"], "values of step 3"),
        (["inspect", "trace.json", "runs/small", "--trace-hash"], "equal: every value"),
    ):
        process = start(*arguments, "--nproc", "2")
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert says in out + err
    trace = json.loads(Path("trace.json").read_text(encoding="utf-8"))
    assert (trace["start"], trace["step"], len(trace["ranks"])) == (2, 3, 2)
