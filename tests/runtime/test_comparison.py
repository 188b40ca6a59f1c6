"""A comparison trains every spec with every seed on the same tokens, and says what it found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moegraph.errors import UsageError
from moegraph.runtime.comparison import Against, Comparison, Trained, compare
from moegraph.specs import Spec

from .small_runs import run, run_spec

SHORT = ("train.steps=3", "train.validation={every: 3, sequences: 4}", "model.num_layers=2")


@pytest.fixture
def specs(tmp_path: Path) -> dict[str, Spec]:
    sparse = run_spec(tmp_path, *SHORT)
    dense = run_spec(tmp_path, *SHORT, "model.moe=null", "model.dense={d_ff: 48, layers: all}")
    return {"sparse": sparse, "dense": dense}


def test_every_spec_is_trained_with_every_seed_and_compared_seed_by_seed(
    specs: dict[str, Spec], tokens: Path, tmp_path: Path
) -> None:
    told: list[Trained] = []
    found = compare(specs, [0, 3], base=tokens, output=tmp_path / "runs", report=told.append)
    assert [(each.name, each.seed) for each in told] == [("sparse", 0), ("sparse", 3), ("dense", 0), ("dense", 3)]
    assert found.runs == tuple(told)
    (against,) = found.against
    losses = {(each.name, each.seed): each.validation_loss for each in told}
    assert len(set(losses.values())) == 4
    assert against.differences == {seed: losses["sparse", seed] - losses["dense", seed] for seed in (0, 3)}
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {f"{n}-seed-{s}" for n in specs for s in (0, 3)}
    assert json.loads(json.dumps(found.to_json()))["against"][0]["mean"] == pytest.approx(against.mean)
    # a run of a comparison is the run that `train` makes
    alone = run(run_spec(tmp_path, *SHORT, "train.seed=3"), tokens)
    assert alone.result.validation_loss == losses["sparse", 3]


def test_it_says_who_is_better_and_whether_every_seed_agrees() -> None:
    better = Against("a", "b", {0: -0.2, 1: -0.1, 2: -0.3})
    assert better.mean == pytest.approx(-0.2)
    assert better.every_seed_agrees
    assert better.sentence() == (
        "a: validation loss 0.2000 nats below that of b on average (differences -0.3000 to -0.1000), "
        "lower with 3 of 3 seeds"
    )
    assert Against("a", "b", {0: 0.2, 1: 0.1}).every_seed_agrees
    assert not Against("a", "b", {0: -0.2, 1: 0.1}).every_seed_agrees
    assert not Against("a", "b", {0: 0.0, 1: 0.1}).every_seed_agrees
    assert "above" in Against("a", "b", {0: -0.1, 1: 0.2}).sentence()
    assert Comparison((), (better,)).to_json()["against"][0]["every_seed_agrees"] is True


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.steps=4", r"would not see the same tokens: train\.steps is 3 and 4"),
        ("train.tokens_per_step=128", r"train\.tokens_per_step is 64 and 128"),
        ("data.document_mask=false", r"data\.document_mask is True and False"),
        ("train.validation={every: 3, sequences: 5}", r"train\.validation\.sequences is 4 and 5"),
        ("train.validation=null", "other has no train.validation"),
    ],
)
def test_specs_that_cannot_be_compared_are_refused(override: str, message: str, tmp_path: Path) -> None:
    both = {"first": run_spec(tmp_path, *SHORT), "other": run_spec(tmp_path, *SHORT, override)}
    with pytest.raises(UsageError, match=message):
        compare(both, [0], base=tmp_path, output=tmp_path)


def test_seeds_are_given_once_each(specs: dict[str, Spec], tmp_path: Path) -> None:
    for seeds in ([], [1, 1], [-1]):
        with pytest.raises(UsageError, match="give each one once, from 0 up"):
            compare(specs, seeds, base=tmp_path, output=tmp_path)
    with pytest.raises(UsageError, match="at least two specs"):
        compare({"sparse": specs["sparse"]}, [0], base=tmp_path, output=tmp_path)
