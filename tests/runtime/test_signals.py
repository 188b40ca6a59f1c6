"""SIGUSR1 saves a checkpoint and goes on, SIGTERM saves one and stops, with one process and several."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from moegraph.checkpoint.reader import Checkpoint
from moegraph.checkpoint.start import list_steps
from moegraph.runtime.run_log import read_records
from moegraph.runtime.signals import Signals

from .test_interrupt import SPEC, wait_for


def start(tokens: Path, folder: Path, *options: str, launcher: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """`moegraph train` of a run without an end, that has been told nothing about checkpoints."""
    spec = folder / "spec.yaml"
    spec.write_text(SPEC.replace("COMPILE", "eager"), encoding="utf-8")
    call = [sys.executable, "-m", *(launcher or ()), *(["-m"] if launcher else []), "moegraph", "train", str(spec)]
    call += ["--set", f"train.output_dir={folder / 'run'}", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        call, cwd=tokens, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def trained(folder: Path) -> int:
    metrics = folder / "run" / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def saved(folder: Path) -> list[int]:
    return sorted(list_steps(folder / "run")) if (folder / "run" / "checkpoints").is_dir() else []


def goes_on_from(tokens: Path, folder: Path, step: int, *options: str) -> None:
    """The same command, two steps further: its first record is that of the next step."""
    process = start(tokens, folder, "--set", f"train.steps={step + 2}", *options)
    text, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    assert f"step-{step:06d}, step {step}" in text
    records = [json.loads(line)["step"] for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert records == list(range(1, step + 3))


TWO = ("--nproc", "2", "--set", "layout.dp=2")


@pytest.mark.parametrize("options", [pytest.param((), marks=pytest.mark.slow), TWO], ids=["one process", "two ranks"])
def test_usr1_saves_and_term_saves_and_stops(tokens: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    process = start(tokens, tmp_path, *options)
    wait_for(process, lambda: trained(tmp_path) > 3, 60)
    process.send_signal(signal.SIGUSR1)
    wait_for(process, lambda: len(saved(tmp_path)) == 1, 30)
    before = trained(tmp_path)
    wait_for(process, lambda: trained(tmp_path) > before + 3, 30)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)  # a second one does not break the save
    text, errors = process.communicate(timeout=60)
    assert process.returncode == 143, errors
    steps = saved(tmp_path)
    assert len(steps) == 2
    assert steps[-1] == trained(tmp_path) == read_records(tmp_path / "run")[-1]["step"]
    assert f"SIGTERM: stopped after step {steps[-1]}; the same command goes on from its checkpoint" in text
    assert not (tmp_path / "run" / "model.safetensors").exists()
    Checkpoint.open(list_steps(tmp_path / "run")[steps[-1]]).verify()
    if not options:
        goes_on_from(tokens, tmp_path, steps[-1])


@pytest.mark.slow
def test_one_rank_of_torchrun_is_told_and_all_stop_after_the_same_step(tokens: Path, tmp_path: Path) -> None:
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    process = start(tokens, tmp_path, "--set", "layout.dp=2", launcher=launcher)
    wait_for(process, lambda: trained(tmp_path) > 3, 60)
    os.kill(_rank_process(process.pid, 1), signal.SIGTERM)
    text, _ = process.communicate(timeout=60)
    steps = saved(tmp_path)
    assert len(steps) == 1
    assert steps[0] == trained(tmp_path)
    assert f"SIGTERM: stopped after step {steps[0]}" in text


def _rank_process(agent: int, rank: int) -> int:
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            wanted = f"RANK={rank}".encode() in (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if parent == agent and wanted:
            return int(entry.name)
    raise AssertionError(f"there is no rank {rank}")


def test_handlers_are_put_back() -> None:
    before = [signal.getsignal(each) for each in (signal.SIGUSR1, signal.SIGTERM)]
    with Signals() as signals:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert signals.requests == (True, False)
        signals.saved()
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.requests == (False, True)
    assert [signal.getsignal(each) for each in (signal.SIGUSR1, signal.SIGTERM)] == before
