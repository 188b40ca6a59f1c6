"""`moegraph compare` trains each spec with each seed and says which learns better."""

from __future__ import annotations

from pathlib import Path

import pytest

from .conftest import Moegraph
from .test_train import prepare_tokens

ON = ("--set", "train.validation={every: 2, sequences: 2}", "--set", "data.source=tokens")


@pytest.fixture
def two(small: Path) -> Path:
    """A working directory with ./moegraph.yaml, ./dense.yaml and the data of both."""
    dense = "spec_version: 1\nextends: moegraph.yaml\nmodel: {moe: null, dense: {d_ff: 32, layers: all}}\n"
    (small.parent / "dense.yaml").write_text(dense, encoding="utf-8")
    prepare_tokens(small.parent / "tokens")
    return small.parent


def test_a_row_for_each_run_and_a_sentence_about_them(two: Path, moegraph: Moegraph) -> None:
    done = moegraph("compare", "moegraph.yaml", "dense.yaml", "--seeds", "0,7", *ON)
    assert done.status == 0, done.err
    head, *rows = done.out.splitlines()
    assert head.split("  ")[0] == "spec"
    assert [row.split()[0] for row in rows[:4]] == ["moegraph", "moegraph", "dense", "dense"]
    assert rows[-1].startswith("moegraph: validation loss 0.")
    assert " of 2 seeds" in rows[-1]
    assert [line.split(":")[0] for line in done.err.splitlines()] == [
        f"{name}, seed {seed}" for name in ("moegraph", "dense") for seed in (0, 7)
    ]
    assert {path.name for path in Path("runs/compare").iterdir()} == {
        f"{name}-seed-{seed}" for name in ("moegraph", "dense") for seed in (0, 7)
    }


def test_as_json(two: Path, moegraph: Moegraph) -> None:
    done = moegraph("compare", "moegraph.yaml", "dense.yaml", "--seeds", "1", "-o", "here", "--json", *ON)
    assert done.status == 0, done.err
    assert [run["seed"] for run in done.json["runs"]] == [1, 1]
    (against,) = done.json["against"]
    losses = [run["validation_loss"] for run in done.json["runs"]]
    assert against["differences"] == {"1": losses[0] - losses[1]}
    assert Path("here/dense-seed-1/metrics.jsonl").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("moegraph.yaml", "dense.yaml", "--seeds", "0,x"), "whole numbers with commas between"),
        (("moegraph.yaml", "dense.yaml", "--seeds", "0,0"), "give each one once"),
        (("moegraph.yaml",), "at least two specs"),
        (("moegraph.yaml", "./moegraph.yaml"), "two of the specs are called moegraph"),
        (("moegraph.yaml", "dense.yaml"), "has no train.validation"),
    ],
)
def test_a_call_that_cannot_work_is_refused(
    arguments: tuple[str, ...], message: str, small: Path, moegraph: Moegraph
) -> None:
    (small.parent / "dense.yaml").write_text("spec_version: 1\nextends: moegraph.yaml\n", encoding="utf-8")
    done = moegraph("compare", *arguments)
    assert done.status == 2
    assert message in done.err
