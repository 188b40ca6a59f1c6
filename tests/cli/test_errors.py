"""How things end that go wrong: a status, a sentence, no traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from moegraph.errors import CheckFailed, DataError, MoegraphError, RunError

from .conftest import Moegraph


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("nothing", "No such command"),
        ("inspect --nothing", "No such option"),
        ("inspect a b", "unexpected extra argument"),
        ("inspect --stage x", "--stage"),
        ("data", ""),
        ("data show", "DIR"),
        ("inspect no-such.yaml", "no such file"),
        ("compile presets/tniy.yaml", "did you mean presets/tiny.yaml"),
        ("inspect", "moegraph init"),
        ("train", "moegraph init"),
        ("inspect .", "no compiled directory"),
        ("inspect presets/tiny.yaml --grep (", "not a regular expression"),
        ("verify presets/tiny.yaml --seed -1", "--seed"),
        ("verify presets/tiny.yaml --seed 9223372036854775808", "--seed"),
        ("inspect presets/tiny.yaml --set model", "--set section.key=value"),
    ],
)
def test_a_wrong_call_ends_with_2_and_a_sentence(moegraph: Moegraph, here: Path, line: str, says: str) -> None:
    done = moegraph(*line.split())
    assert done.status == 2
    assert done.out == ""
    assert says in done.err
    assert "Traceback" not in done.err
    assert not list(here.iterdir())


def test_an_empty_name_is_no_folder(moegraph: Moegraph, here: Path) -> None:
    done = moegraph("train", "")
    assert (done.status, "SPEC is empty" in done.err) == (2, True)


def test_a_pass_file_that_leaves_is_not_taken_for_success(moegraph: Moegraph, here: Path) -> None:
    Path("leaves.py").write_text("import sys\nsys.exit(0)\n", encoding="utf-8")
    done = moegraph("inspect", "presets/tiny.yaml", "--pass-file", "leaves.py")
    assert (done.status, "leaves.py fails when it is run: SystemExit: 0" in done.err) == (2, True)


def test_a45_unknown_keys_are_named_with_place_and_suggestion(moegraph: Moegraph, here: Path) -> None:
    text = "spec_version: 1\nextends: presets/tiny.yaml\nlearning_rate: 3e-4\ntrain:\n  num-epochs: 3\n"
    (here / "run.yaml").write_text(text, encoding="utf-8")
    for command in ("compile", "train", "inspect", "verify"):
        done = moegraph(command, "run.yaml")
        assert done.status == 2
        assert "run.yaml:3:1: learning_rate" in done.err
        assert "train.optimizer.lr" in done.err
        assert "run.yaml:5:3: train.num-epochs" in done.err
        assert "Traceback" not in done.err
    assert [path.name for path in here.iterdir()] == ["run.yaml"]


def test_with_json_an_error_is_an_object_on_stdout(moegraph: Moegraph, here: Path) -> None:
    done = moegraph("inspect", "presets/tiny.yaml", "--set", "model.moe.topk=2", "--json")
    assert done.status == 2
    (problem,) = done.json["problems"]
    assert done.json["error"] == "SpecError"
    assert problem["path"] == "model.moe.topk"
    assert problem["nearest"] == "top_k"
    done = moegraph("nothing", "--json")
    assert (done.status, done.json["error"], done.json["exit_code"]) == (2, "UsageError", 2)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (CheckFailed("it does not hold"), 3),
        (RunError("it broke"), 1),
        (DataError("no such data"), 1),
        (DataError("a wrong call", exit_code=2), 2),
        (MoegraphError("something"), 1),
    ],
)
def test_errors_end_with_their_own_status(
    moegraph: Moegraph, here: Path, monkeypatch: pytest.MonkeyPatch, error: MoegraphError, status: int
) -> None:
    monkeypatch.setattr("moegraph.specs.template.template", raises(error))
    done = moegraph("init", "--json")
    assert (done.status, done.err, done.json["message"]) == (status, f"error: {error}\n", str(error))


def test_a_fault_of_ours_is_one_line_and_debug_shows_the_traceback(
    moegraph: Moegraph, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moegraph.specs.template.template", raises(KeyError("boo")))
    done = moegraph("init")
    assert done.status == 1
    assert done.err.startswith("error: KeyError: 'boo'")
    assert "--debug" in done.err
    assert done.err.count("\n") == 1
    for line in (["--debug", "init"], ["init", "--debug"]):
        done = moegraph(*line)
        assert done.status == 1
        assert "Traceback" in done.err


def test_ctrl_c_ends_with_130(moegraph: Moegraph, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moegraph.specs.template.template", raises(KeyboardInterrupt()))
    done = moegraph("init")
    assert (done.status, done.err.strip()) == (130, "interrupted")


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    command = f"{sys.executable} -m moegraph schema | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("{\n", "")


def raises(error: BaseException):
    def function() -> str:
        raise error

    return function
