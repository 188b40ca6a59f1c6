"""A run's log survives kills and full disks, and never ends the run."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from moegraph.errors import UsageError
from moegraph.runtime import tensorboard
from moegraph.runtime.manifest import build_manifest, versions
from moegraph.runtime.run_log import RunLog, read_manifest, read_records


def test_records_come_back_as_written(tmp_path: Path) -> None:
    records = [{"step": i, "loss": 7.0 - i, "router": {"layers.1": {"counts": [1, i]}}} for i in range(1, 4)]
    with RunLog(tmp_path / "run") as log:
        for record in records:
            log.write(record)
            assert read_records(tmp_path / "run")[-1] == record  # readable at once, while the run goes on
    assert read_records(tmp_path / "run") == records


def test_each_record_is_one_line_of_plain_json(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        log.write({"step": 1, "note": "two\nlines", "pair": (1, 2)})
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line) == {"step": 1, "note": "two\nlines", "pair": [1, 2]}


def test_numbers_that_json_cannot_say_become_null_and_are_listed(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        log.write({"step": 1, "loss": float("nan"), "router": {"layers.0": {"entropy": float("inf")}}})
    (record,) = read_records(tmp_path)
    assert record["loss"] is None
    assert record["non_finite"] == ["loss", "router.layers.0.entropy"]


def test_a_torn_last_line_is_skipped_by_the_reader_and_removed_by_the_next_run(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        log.write({"step": 1, "loss": 1.0})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')
    assert [record["step"] for record in read_records(tmp_path)] == [1]
    with RunLog(tmp_path) as log:
        log.write({"step": 2, "loss": 0.5})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "loss": 1.0}\n{"step": 2, "loss": 0.5}\n'


def test_a_file_that_is_one_torn_line_is_emptied(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("x" * 200_000)
    RunLog(tmp_path).close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""


def test_steps_that_were_repeated_count_once(tmp_path: Path) -> None:
    for losses in ((3.0, 2.0, 1.0), (2.5, 1.5)):
        with RunLog(tmp_path) as log:
            for i, loss in enumerate(losses):
                log.write({"step": i + 4 - len(losses), "loss": loss})
    assert [(r["step"], r["loss"]) for r in read_records(tmp_path)] == [(1, 3.0), (2, 2.5), (3, 1.5)]


def test_lines_that_are_no_records_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(
        b'[1]\n"text"\n{"loss": 1}\n\xff\xfe\n' + b"[" * 100_000 + b'\n{"step": 5}\n'
    )
    assert read_records(tmp_path) == [{"step": 5}]


def test_a_kill_leaves_whole_lines(tmp_path: Path) -> None:
    """The process kills itself right after a write, without closing anything."""
    code = (
        "import os, signal, sys; from pathlib import Path; from moegraph.runtime.run_log import RunLog\n"
        "log = RunLog(Path(sys.argv[1]))\n"
        "for step in range(1, 51): log.write({'step': step, 'loss': 1.0})\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(read_records(tmp_path)) == 50
    assert (tmp_path / "metrics.jsonl").read_bytes().endswith(b"}\n")


def test_a_folder_that_cannot_be_written_is_said_once_and_training_goes_on(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said: list[str] = []
    with RunLog(tmp_path / "file" / "run", said.append) as log:
        for step in range(3):
            log.write({"step": step, "loss": 1.0})
        log.write_manifest({"a": 1})
        log.write_manifest({"a": 2})
    assert [message.split(" in ")[0] for message in said if "TensorBoard" not in message] == [
        "metrics.jsonl",
        "manifest.json",
    ]
    assert "training goes on without" in said[0]


def test_a_full_disk_loses_the_record_and_not_the_file(tmp_path: Path) -> None:
    said: list[str] = []
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with RunLog(tmp_path, said.append) as log:
        log.write({"step": 1, "loss": 1.0})
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (40, before[1]))
            log.write({"step": 2, "loss": 1.0, "text": "x" * 100})
            log.write({"step": 3, "loss": 1.0, "text": "x" * 100})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, ignored)
        log.write({"step": 4, "loss": 1.0})
    assert [record["step"] for record in read_records(tmp_path)] == [1, 4]
    assert (tmp_path / "metrics.jsonl").read_bytes().count(b"\n") == 2
    assert len([message for message in said if message.startswith("metrics.jsonl")]) == 1


def test_the_manifest_is_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    with RunLog(tmp_path, said.append) as log:
        log.write_manifest({"a": 1})
        monkeypatch.setattr(os, "replace", _fails)
        log.write_manifest({"a": 2})
    assert read_manifest(tmp_path) == {"a": 1}
    assert {path.name for path in tmp_path.iterdir()} - {"tensorboard"} == {"manifest.json", "metrics.jsonl"}
    assert len(said) == 1


def _fails(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_folder_without_a_run_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not the folder of a run"):
        read_records(tmp_path)
    with pytest.raises(UsageError, match=r"no manifest\.json"):
        read_manifest(tmp_path)
    (tmp_path / "manifest.json").write_text("[1]")
    with pytest.raises(UsageError, match="holds no mapping"):
        read_manifest(tmp_path)


def test_a_record_needs_a_step(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log, pytest.raises(ValueError, match="whole number"):
        log.write({"step": 1.0})


class _Writer:
    def __init__(self) -> None:
        self.added: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.added.append((tag, value, step))

    def close(self) -> None:
        pass


def test_numbers_go_to_tensorboard_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = _Writer()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr(tensorboard, "_open", lambda folder: writer)
    with RunLog(tmp_path) as log:
        log.write({"step": 3, "loss": 2, "done": True, "router": {"layers.1": {"load_max": 1.5, "counts": [1, 2]}}})
    assert writer.added == [("loss", 2.0, 3), ("router/layers.1/load_max", 1.5, 3)]


def test_a_tensorboard_that_fails_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr(tensorboard, "_open", _fails)
    said: list[str] = []
    with RunLog(tmp_path, said.append) as log:
        log.write({"step": 1, "loss": 1.0})
        log.write({"step": 2, "loss": 1.0})
    assert said == [
        f"TensorBoard files in {tmp_path} cannot be written (No space left on device); training goes on without"
    ]
    assert len(read_records(tmp_path)) == 2


def test_without_tensorboard_nothing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    said: list[str] = []
    with RunLog(tmp_path, said.append) as log:
        log.write({"step": 1, "loss": 1.0})
    assert said == []
    assert not (tmp_path / "tensorboard").exists()


def test_the_manifest_says_what_was_run_with_what(tmp_path: Path) -> None:
    manifest = build_manifest(
        resolved_spec={"spec_version": 1},
        graph_hashes={"lower": "ab12"},
        data={"source": "corpus:x", "fingerprint": "cd34"},
        parameters=(10, 5),
        flops_per_token=30.0,
        device="cpu",
        tuning_tables={"your table": "ef56"},
        overlap_seconds={"off": 0.2, "on": 0.1},
        folder=tmp_path,
    )
    with RunLog(tmp_path / "run") as log:
        log.write_manifest(manifest)
    read = read_manifest(tmp_path / "run")
    assert read["parameters"] == {"total": 10, "active": 5}
    assert read["graph_hashes"] == {"lower": "ab12"}
    assert read["data"]["fingerprint"] == "cd34"
    assert read["tuning_tables"] == {"your table": "ef56"}
    assert read["overlap_seconds"] == {"off": 0.2, "on": 0.1}
    assert read["git"] is None
    assert read["versions"] == versions()
    assert {"python", "torch", "moegraph"} <= read["versions"].keys()


def test_logs_are_read_and_drawn_without_importing_torch() -> None:
    code = (
        "import sys, moegraph.runtime.run_log, moegraph.runtime.router_view, moegraph.runtime.progress\n"
        "import moegraph.runtime.peaks, moegraph.runtime.learning_rate, moegraph.runtime.router_metrics\n"
        "import moegraph.runtime.manifest\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
