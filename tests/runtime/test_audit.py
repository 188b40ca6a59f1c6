"""The chain of a run: each step bound to those before it, kept right over resumes, and compared with a replay."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from moegraph.cli.main import run as moegraph
from moegraph.errors import CheckFailed, UsageError
from moegraph.runtime.audit import AUDIT, linked, read_chain
from moegraph.runtime.run_log import read_records

from .small_runs import run, run_spec

STEPS = ("train.steps=6", "checkpoint.every=2")


@pytest.fixture(scope="module")
def trained(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps with three checkpoints."""
    folder = tmp_path_factory.mktemp("audit")
    run(run_spec(folder, *STEPS), tokens)
    return folder / "run"


@pytest.fixture
def copy(trained: Path, tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One that may be spoilt; the current folder is that of the data."""
    monkeypatch.chdir(tokens)
    return Path(shutil.copytree(trained, tmp_path / "run"))


def rewrite(folder: Path, step: int, **facts: object) -> None:
    """Changes the facts of a step and makes the whole chain after it right again."""
    lines, previous = [], "0" * 64
    for line in read_chain(folder):
        kept = {key: value for key, value in line.items() if key not in ("previous", "digest")}
        lines.append(linked({**kept, **(facts if line["step"] == step else {})}, previous))
        previous = lines[-1]["digest"]
    (folder / AUDIT).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def test_every_step_has_a_line_and_the_checkpoint_its_digest(trained: Path) -> None:
    chain = read_chain(trained)
    assert [line["step"] for line in chain] == list(range(7))
    assert [line["loss"] for line in chain[1:]] == [record["loss"] for record in read_records(trained)]
    assert len({line["samples"] for line in chain[1:]}) == 6
    for step in (2, 4, 6):
        manifest = json.loads((trained / "checkpoints" / f"step-{step:06d}" / "manifest.json").read_text())
        assert manifest["audit"] == chain[step]["digest"]
    manifest = json.loads((trained / "manifest.json").read_text())
    assert manifest["graph_hashes"]
    assert manifest["data"]["fingerprint"] == chain[0]["data"]


def edit(change: Callable[[list[str]], None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        lines = (folder / AUDIT).read_text().splitlines()
        change(lines)
        (folder / AUDIT).write_text("\n".join(lines) + "\n")

    return apply


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (edit(lambda lines: lines.__setitem__(3, lines[3].replace('"loss": ', '"loss": 1'))), 4),
        (edit(lambda lines: lines.pop(3)), 4),
        (edit(lambda lines: lines.insert(3, lines[2])), 4),
        (edit(lambda lines: lines.reverse()), 2),
        (edit(lambda lines: lines.__setitem__(5, "[]")), 6),
    ],
    ids=["a changed number", "a removed line", "a line twice", "another order", "no line"],
)
def test_a_chain_that_was_changed_is_refused_where_it_breaks(
    copy: Path, change: Callable[[Path], None], line: int, capsys: pytest.CaptureFixture[str]
) -> None:
    change(copy)
    with pytest.raises(CheckFailed, match=rf"{AUDIT}:{line}\b"):
        read_chain(copy)
    assert moegraph(["verify", str(copy)]) == 3


def test_a_whole_chain_is_told_without_training(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert moegraph(["verify", str(copy)]) == 0
    assert f"the chain is whole up to step 6, digest {read_chain(copy)[-1]['digest']}" in capsys.readouterr().out


def test_a_run_that_goes_on_has_the_chain_of_one_that_never_stopped(
    copy: Path, trained: Path, tokens: Path, tmp_path: Path
) -> None:
    shutil.rmtree(copy / "checkpoints" / "step-000006")
    whole = (trained / AUDIT).read_text()
    with open(copy / AUDIT, "a", encoding="utf-8") as file:
        file.write('{"step": 7, "lo')  # killed
    run(run_spec(tmp_path, *STEPS), tokens)
    assert [json.loads(line) for line in (copy / AUDIT).read_text().splitlines()] == [
        json.loads(line) for line in whole.splitlines()
    ]


def test_a_broken_chain_begins_anew_where_the_run_goes_on(copy: Path, tokens: Path, tmp_path: Path) -> None:
    shutil.rmtree(copy / "checkpoints" / "step-000006")
    lost = read_chain(copy)[4]["digest"]
    (copy / AUDIT).write_text("{}\n", encoding="utf-8")
    again = run(run_spec(tmp_path, *STEPS), tokens)
    assert "a new chain begins at step 4" in again.printed
    chain = read_chain(copy)
    assert [line["step"] for line in chain] == [4, 5, 6]
    assert chain[0]["previous"] == lost


def test_a_replay_finds_the_same_steps(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*")}
    assert moegraph(["verify", str(copy), "--steps", "4:5"]) == 0
    assert "steps 4 to 5 are the same, trained again after step 2" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in copy.rglob("*")} == before
    assert moegraph(["verify", str(copy), "--steps", "1:2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["start"] == 0


def test_a_replay_names_the_first_step_that_differs(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewrite(copy, 4, grad_norm=1.25)
    assert moegraph(["verify", str(copy), "--steps", "3:6"]) == 3
    assert "step 4 is the first that differs: grad_norm was 1.25, and is " in capsys.readouterr().err


def test_a_run_with_another_learning_rate_differs_one_step_after_it(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert moegraph(["verify", str(copy), "--steps", "3:6", "--set", "train.optimizer.lr=0.02"]) == 3
    assert "step 4 is the first that differs: loss was " in capsys.readouterr().err


@pytest.mark.parametrize("steps", ["0:3", "5:4", "x", "3:9", "1:"])
def test_steps_that_are_not_there_are_refused(copy: Path, steps: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert moegraph(["verify", str(copy), "--steps", steps]) == 2


def test_a_run_without_a_chain_is_refused(copy: Path) -> None:
    (copy / AUDIT).unlink()
    with pytest.raises(UsageError, match="has no audit"):
        read_chain(copy)
