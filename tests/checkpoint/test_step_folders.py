"""The folders of steps: which there are, which stay, and what a killed process left."""

from __future__ import annotations

from pathlib import Path

import pytest

from moegraph.checkpoint import step_folders
from moegraph.checkpoint.names import LATEST, parse_step, step_name
from moegraph.checkpoint.step_folders import begin, complete_steps, publish, read_latest, remove_old, tidy, to_remove


def make(root: Path, *names: str) -> None:
    for name in names:
        (root / name).mkdir(parents=True)
        (root / name / "content").write_text(name, encoding="ascii")


def names(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


@pytest.mark.parametrize("step", [0, 7, 999_999, 1_000_000, 2**31])
def test_a_step_has_one_name(step: int) -> None:
    assert parse_step(step_name(step)) == step


@pytest.mark.parametrize("name", ["step-7", "step-0000007", "step-000007 ", "step-000007.partial", "xstep-000007", ""])
def test_no_other_name_is_a_step(name: str) -> None:
    assert parse_step(name) is None


@pytest.mark.parametrize(
    ("steps", "last", "every", "gone"),
    [
        ([], 1, None, []),
        ([10], 1, None, []),
        ([10, 20, 30], 1, None, [10, 20]),
        ([10, 20, 30], 3, None, []),
        ([10, 20, 30, 40, 50], 2, 20, [10, 30]),
        ([50, 10, 40, 20, 30], 1, 50, [10, 20, 30, 40]),
    ],
)
def test_what_stays(steps: list[int], last: int, every: int | None, gone: list[int]) -> None:
    assert to_remove(steps, last, every) == gone


def test_a_step_is_published_and_latest_says_so(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    (begin(root, 3) / "content").write_text("new", encoding="ascii")
    assert complete_steps(root) == {}
    assert publish(root, 3) == root / "step-000003"
    assert read_latest(root) == "step-000003"
    assert names(root) == {LATEST, "step-000003"}


def test_a_step_that_is_there_is_replaced(tmp_path: Path) -> None:
    make(tmp_path, "step-000003")
    (begin(tmp_path, 3) / "content").write_text("new", encoding="ascii")
    publish(tmp_path, 3)
    assert (tmp_path / "step-000003" / "content").read_text(encoding="ascii") == "new"
    assert names(tmp_path) == {LATEST, "step-000003"}


def test_a_replaced_step_counts_until_the_new_one_has_its_name(tmp_path: Path) -> None:
    make(tmp_path, "step-000003.replaced")
    assert complete_steps(tmp_path) == {3: tmp_path / "step-000003.replaced"}
    make(tmp_path, "step-000003")
    assert complete_steps(tmp_path) == {3: tmp_path / "step-000003"}


def test_tidying_removes_what_was_left_and_nothing_else(tmp_path: Path) -> None:
    kept = {"step-000001", "step-000009.abandoned", "mine", "notes.partial"}
    make(tmp_path, *kept, "step-000002.replaced", "step-000003.partial", "step-000004.deleting", "step-000001.replaced")
    (tmp_path / ".latest.partial").write_text("", encoding="ascii")
    (tmp_path / "step-000008.partial").symlink_to(tmp_path / "mine")
    tidy(tmp_path)
    assert names(tmp_path) == kept | {"step-000002", "step-000008.partial"}
    assert (tmp_path / "step-000002" / "content").read_text(encoding="ascii") == "step-000002.replaced"
    assert (tmp_path / "step-000001" / "content").read_text(encoding="ascii") == "step-000001"


def test_an_old_step_that_cannot_be_removed_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, *map(step_name, (1, 2, 3)))

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(step_folders.shutil, "rmtree", refuse)
    said: list[str] = []
    remove_old(tmp_path, 1, None, said.append)
    assert len(said) == 2
    assert "step-000001 cannot be removed: Permission denied" in said[0]
    assert list(complete_steps(tmp_path)) == [3]


@pytest.mark.parametrize("text", [b"", b"../x", b"step-000001" * 9, b"\xff\xfe", b"step-1"])
def test_what_latest_says_is_not_believed(tmp_path: Path, text: bytes) -> None:
    (tmp_path / LATEST).write_bytes(text)
    assert read_latest(tmp_path) is None
