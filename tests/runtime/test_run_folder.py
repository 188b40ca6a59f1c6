"""The folder of a run: an earlier run is moved aside, what is not a run is refused, and nobody else writes into it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from moegraph.errors import RunError
from moegraph.runtime.run_folder import claim_run_folder

from .small_runs import run_spec, trainer


def claim(folder: Path) -> list[str]:
    notes: list[str] = []
    with claim_run_folder(folder, notes.append) as claimed:
        assert claimed == folder
        assert list(claimed.iterdir()) == []
    return notes


@contextmanager
def as_ordinary_user() -> Iterator[None]:
    """Permissions do not hold the superuser back; within, this process is not the superuser."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_folder_is_made_with_those_above_it(tmp_path: Path) -> None:
    assert claim(tmp_path / "a" / "b") == []


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    assert claim(tmp_path / "run") == []
    assert list(tmp_path.iterdir()) == [tmp_path / "run"]


def test_earlier_runs_are_moved_aside_and_numbered(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for number in (1, 2, 3):
        (notes,) = claim(folder) or [""]
        assert (f"run.{number - 1}" in notes) == (number > 1)
        (folder / "metrics.jsonl").write_text(f"{number}\n", encoding="utf-8")
    assert {p.name: (p / "metrics.jsonl").read_text() for p in tmp_path.iterdir()} == {
        "run": "3\n",
        "run.1": "1\n",
        "run.2": "2\n",
    }


def test_a_folder_of_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work", encoding="utf-8")
    with pytest.raises(RunError, match="holds files that are not a run's: choose another"):
        claim(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_file_or_a_dangling_link_in_its_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("file", "file/below", "link"):
        with pytest.raises(RunError, match=rf"train\.output_dir \S*{name}.*choose another"):
            claim(tmp_path / name)


def test_where_you_are_is_not_moved_away_under_you(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "metrics.jsonl").write_text("", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for name in (".", str(tmp_path)):
        with pytest.raises(RunError, match="is where you are"), claim_run_folder(Path(name), print):
            pass


def test_a_folder_that_cannot_be_written_into_is_refused_before_the_first_step(tokens: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "closed"
        folder.mkdir()
        folder.parent.chmod(0o755)
        folder.chmod(0o555)
        one = trainer(run_spec(folder), tokens)
        no_spec = run_spec(folder / "below")
        (folder / "run").mkdir(mode=0o555) if os.geteuid() == 0 else None
        steps: list[int] = []
        one.loader.step = steps.append  # type: ignore[method-assign, assignment]
        with as_ordinary_user(), pytest.raises(RunError, match=r"cannot be written to \(Permission denied\)"):
            one.run()
        with as_ordinary_user(), pytest.raises(RunError, match="cannot be written to"):
            claim(Path(no_spec.train.output_dir))
        assert steps == []
        folder.chmod(0o755)


def test_a_second_process_is_refused_while_the_first_one_trains(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with claim_run_folder(folder, print):
        for leave in (False, True):  # before and after the run has written something
            if leave:
                (folder / "manifest.json").write_text("{}", encoding="utf-8")
            with pytest.raises(RunError, match="another process is training into"):
                claim(folder)
        assert folder.is_dir()
    assert len(claim(folder)) == 1


def test_a_file_system_without_locks_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(handle: int, how: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("moegraph.runtime.run_folder.fcntl.flock", unsupported)
    said: list[str] = []
    with claim_run_folder(tmp_path / "run", said.append):
        pass
    assert any("cannot be locked (Operation not supported)" in line for line in said)
