"""`moegraph train` trains a spec, or a compiled directory that still says the truth."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .conftest import Done, Moegraph


@pytest.fixture
def work(compiled_once: Path, cached_compile: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a spec, its compiled directory, and data."""
    folder = tmp_path / "work"
    shutil.copytree(compiled_once, folder)
    monkeypatch.chdir(folder)
    prepare_tokens(folder / "tokens")
    return folder


def prepare_tokens(folder: Path) -> None:
    from moegraph.data.prepare import prepare

    text = folder.with_name("text")
    text.mkdir()
    for number in range(40):
        (text / f"{number}.txt").write_text(f"def f{number}(x): return x + {number}\n" * 8, encoding="utf-8")
    prepare([text], output=folder, vocab_size=300, validation_fraction=0.1)


def change_report(folder: Path, **changes: object) -> None:
    path = folder / "report.json"
    report = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**report, **changes}), encoding="utf-8")


def trained(done: Done) -> bool:
    return done.status == 0 and Path("runs/small/metrics.jsonl").is_file()


def test_a_spec_trains_and_the_result_is_json(work: Path, moegraph: Moegraph) -> None:
    done = moegraph("train", "moegraph.yaml", "--json")
    assert done.status == 0, done.err
    assert done.json["folder"] == "runs/small"
    assert done.json["steps"] == 2
    done = moegraph("inspect", "runs/small", "--json")
    assert done.json["last"]["step"] == 2
    assert done.json["last"]["loss"] > 0
    assert {"loss", "grad_norm"} <= set(done.json["last"])
    assert moegraph("inspect", "runs/small", "--router").out.splitlines()[-1].startswith("layers.1 ")
    assert "started" in moegraph("inspect", "runs/small").out


def test_without_an_argument_the_directory_compiled_last_is_used(work: Path, moegraph: Moegraph) -> None:
    done = moegraph("train")
    assert trained(done), done.err
    assert "compiled/moegraph: the graphs after each of 9 passes" in done.err


def test_what_was_compiled_with_overrides_is_trained_with_them(work: Path, moegraph: Moegraph) -> None:
    """A run cut short, and a folder that only the person at the command line may name."""
    spec = work / "moegraph.yaml"
    warmed_up = spec.read_text(encoding="utf-8").replace("{kind: constant}", "{kind: constant, warmup: 2}")
    spec.write_text(warmed_up, encoding="utf-8")
    given = ["train.steps=1", f"train.output_dir={work / 'elsewhere'}"]
    overrides = [part for override in given for part in ("--set", override)]
    assert moegraph("compile", "-o", "mine", *overrides).status == 0
    done = moegraph("train", "mine", "--json")
    assert done.status == 0, done.err
    assert (done.json["folder"], done.json["steps"]) == (str(work / "elsewhere"), 1)
    shutil.copytree("mine", "from-elsewhere")
    done = moegraph("train", "from-elsewhere")
    assert (done.status, "is an absolute path" in done.err) == (2, True)


def test_without_a_spec_here_too(work: Path, moegraph: Moegraph) -> None:
    (work / "moegraph.yaml").unlink()
    assert trained(moegraph("train"))


def test_a_spec_changed_since_then_is_trained_as_it_is_now(work: Path, moegraph: Moegraph) -> None:
    spec = work / "moegraph.yaml"
    spec.write_text(spec.read_text(encoding="utf-8").replace("steps: 2", "steps: 1"), encoding="utf-8")
    done = moegraph("train", "--json")
    assert done.status == 0, done.err
    assert done.json["steps"] == 1
    assert "it is not used" in done.err


def test_a_graph_that_is_not_the_compiled_one_is_refused_naming_the_first_pass(work: Path, moegraph: Moegraph) -> None:
    folder = work / "compiled" / "moegraph"
    spec = folder / "spec.yaml"
    spec.write_text(spec.read_text(encoding="utf-8").replace("z_coef: 0.0001", "z_coef: 0"), encoding="utf-8")
    done = moegraph("train", folder)
    assert done.status == 3
    assert "after pass 'balance-losses'" in done.err
    assert not Path("runs").exists()


def test_a_forged_hash_is_refused_and_changed_versions_are_named(work: Path, moegraph: Moegraph) -> None:
    folder = work / "compiled" / "moegraph"
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    for each in report["passes"][3:]:
        each["hash"] = "0" * 64
    change_report(folder, passes=report["passes"], versions={**report["versions"], "torch": "1.0"})
    done = moegraph("train", folder)
    assert done.status == 3
    assert "after pass 'dispatch-experts'" in done.err
    assert "torch 1.0 → " in done.err


def test_a_pass_that_is_missing_now_is_named_with_its_file(work: Path, moegraph: Moegraph) -> None:
    folder = work / "compiled" / "moegraph"
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    passes = [*report["passes"][:3], {"name": "mine", "hash": "0"}, *report["passes"][3:]]
    change_report(folder, passes=passes, pass_files={"mine.py": ["mine"]})
    done = moegraph("train", folder)
    assert done.status == 3
    assert "pass 'mine' ran when it was compiled, and in its place is 'dispatch-experts' now" in done.err
    assert "mine.py: give --pass-file" in done.err


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": "moegraph-compiled", "format_version": 1}', "[" * 100_000]
)
def test_a_damaged_report_is_refused(work: Path, moegraph: Moegraph, text: str) -> None:
    (work / "compiled" / "moegraph" / "report.json").write_text(text, encoding="utf-8")
    done = moegraph("train", "compiled/moegraph")
    assert done.status == 2
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("train --nproc 2", "--nproc 2, but the layout has one rank"),
        ("train --nproc 0", "'--nproc'"),
        ("train --set layout.dp=2", "the layout has 2 ranks and no --nproc is given"),
        ("train text", "no compiled directory"),
    ],
)
def test_what_does_not_exist_yet_is_refused(work: Path, moegraph: Moegraph, line: str, says: str) -> None:
    done = moegraph(*line.split())
    assert done.status == 2
    assert says in done.err


def test_ctrl_c_ends_a_run_with_130_and_whole_records(work: Path) -> None:
    command = [sys.executable, "-m", "moegraph", "train", "moegraph.yaml", "--set", "train.steps=100000"]
    metrics = work / "runs" / "small" / "metrics.jsonl"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        until = time.monotonic() + 60
        while not (metrics.exists() and metrics.read_bytes().count(b"\n") > 2) and time.monotonic() < until:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "interrupted\n")
    assert [json.loads(line)["step"] for line in metrics.read_text(encoding="utf-8").splitlines()][:3] == [1, 2, 3]
    kept = {path.name for path in metrics.parent.iterdir()} - {"tensorboard"}  # where that is installed
    assert kept == {"audit.jsonl", "manifest.json", "metrics.jsonl"}
