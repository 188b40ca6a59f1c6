"""Ctrl-C while a run trains or compiles: it ends at once, with no half-written file and no process left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

SPEC = """\
spec_version: 1
extends: presets/tiny.yaml
model: {vocab_size: 300, d_model: 32, num_layers: 2, dense: {d_ff: 32}}
data: {source: tokens, seq_len: 16}
train: {steps: 1000000, tokens_per_step: 64, validation: null, compile: COMPILE}
"""


def start(tokens: Path, folder: Path, compiler: str) -> subprocess.Popen[str]:
    """`moegraph train` as a terminal starts it: a process group of its own."""
    spec = folder / "spec.yaml"
    spec.write_text(SPEC.replace("COMPILE", compiler), encoding="utf-8")
    output = f"train.output_dir={folder / 'run'}"
    command = [sys.executable, "-m", "moegraph", "train", str(spec), "--set", output]
    return subprocess.Popen(
        command, cwd=tokens, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def wait_for(process: subprocess.Popen[str], happened: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, "it never came so far"
        time.sleep(0.05)


def interrupt(process: subprocess.Popen[str]) -> tuple[int, str, float]:
    """Exit status, stderr, and the seconds it took, after Ctrl-C reached the whole group."""
    began = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    _, text = process.communicate(timeout=60)
    return process.returncode, text, time.monotonic() - began


def left_behind(process: subprocess.Popen[str]) -> list[str]:
    """Command lines of processes in its group, and of compile workers that name it as their parent (Linux)."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            command = (entry / "cmdline").read_text(encoding="utf-8").replace("\0", " ")
            group = (entry / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[2]
            if int(group) == process.pid or f"--parent={process.pid} " in command:
                found.append(command)
    return found


def test_ctrl_c_while_it_trains(tokens: Path, tmp_path: Path) -> None:
    process = start(tokens, tmp_path, "eager")
    metrics = tmp_path / "run" / "metrics.jsonl"
    wait_for(process, lambda: metrics.exists() and metrics.read_bytes().count(b"\n") > 5, 60)
    status, text, seconds = interrupt(process)
    assert (status, text.strip().splitlines()[-1]) == (130, "interrupted")
    assert seconds < 5
    assert left_behind(process) == []
    steps = [json.loads(line)["step"] for line in metrics.read_text(encoding="utf-8").splitlines()]
    assert steps == list(range(1, len(steps) + 1))
    assert {path.name for path in (tmp_path / "run").iterdir()} <= {
        "audit.jsonl",
        "manifest.json",
        "metrics.jsonl",
        "tensorboard",
    }


@pytest.mark.slow
def test_ctrl_c_while_inductor_compiles_leaves_no_worker_and_nothing_that_a_later_run_trusts(
    tokens: Path, tmp_path: Path
) -> None:
    process = start(tokens, tmp_path, "inductor")
    cache = tmp_path / "cache" / "moegraph" / "compiled"
    wait_for(process, lambda: any(cache.rglob("*.cpp")), 90)
    assert left_behind(process) != []
    status, text, seconds = interrupt(process)
    assert (status, text.strip().splitlines()[-1]) == (130, "interrupted")
    assert "Traceback" not in text
    assert seconds < 20
    end = time.monotonic() + 10
    while left_behind(process) and time.monotonic() < end:
        time.sleep(0.1)
    assert left_behind(process) == []
    assert not any(cache.rglob("contents.json"))


@pytest.mark.parametrize("moment", ["mkstemp", "replace"])
def test_ctrl_c_while_weights_are_written_leaves_no_part_of_them(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from moegraph.runtime import weights

    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    target = weights.os if moment == "replace" else weights.tempfile
    monkeypatch.setattr(target, moment, interrupted)
    with pytest.raises(KeyboardInterrupt):
        weights.save_weights(tmp_path, {"w": torch.ones(3)}, {})
    assert list(tmp_path.iterdir()) == []
