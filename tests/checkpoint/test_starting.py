"""Where a run starts from: its own newest checkpoint, one that is named, or nothing; and what may be different."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file

from moegraph.checkpoint.names import CHECKPOINTS, LATEST, MANIFEST, step_name
from moegraph.checkpoint.start import claim_with_start, find_checkpoint
from moegraph.checkpoint.step_folders import complete_steps
from moegraph.data.prepare import prepare
from moegraph.errors import CheckpointError, RunError
from moegraph.runtime.engine import Engine
from tests.checkpoint.small_checkpoints import Ran, run_spec, train_rank, whole, write_checkpoint


def train(folder: Path, tokens: Path, steps: int, *overrides: str, **layout: int) -> Ran:
    return train_rank(0, run_spec(folder, f"train.steps={steps}", *overrides, **layout), tokens)


def refused(folder: Path, tokens: Path, steps: int, *overrides: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        train(folder, tokens, steps, *overrides)
    assert caught.value.exit_code == 2
    return str(caught.value)


NARROW = ["precision.compute=bf16", "train.optimizer.moments=bf16", "train.schedule={kind: cosine, warmup: 2}"]


@pytest.mark.parametrize(
    ("mode", "precision"),
    [("sync", []), ("async", []), ("sync", NARROW), ("async", ["precision.compute=fp32"])],
    ids=["sync-fp64", "async-fp64", "sync-bf16", "async-fp32"],
)
def test_a_run_goes_on_to_the_bit(tokens: Path, tmp_path: Path, mode: str, precision: list[str]) -> None:
    """A28 and A30: weights, moments, biases, the schedule, and the samples."""
    options = [f"checkpoint.mode={mode}", *precision]
    expected = train(tmp_path / "one", tokens, 5, *options)
    train(tmp_path / "two", tokens, 5, *options)
    root = tmp_path / "two" / "run" / CHECKPOINTS
    for step in (3, 4, 5):  # as if it had been killed in step 3
        shutil.rmtree(root / step_name(step))
    ran = train(tmp_path / "two", tokens, 5, *options)
    assert "resumed from" in ran.printed
    assert ran.ids == {step: expected.ids[step] for step in (3, 4, 5)}
    assert ran.losses == expected.losses
    found, right = whole(root / step_name(5)), whole(tmp_path / "one" / "run" / CHECKPOINTS / step_name(5))
    assert found.keys() == right.keys()
    assert all(torch.equal(found[name], right[name]) for name in right)
    assert any(name.startswith("buffer.") and bool(value.any()) for name, value in right.items())


def test_samples_are_not_repeated_or_skipped_when_an_epoch_ends(tokens: Path, tmp_path: Path) -> None:
    long = ["data.seq_len=6", "train.tokens_per_step=6000", "checkpoint.every=1"]
    expected = train(tmp_path / "one", tokens, 4, *long)
    assert train(tmp_path / "two", tokens, 2, *long).ids == {step: expected.ids[step] for step in (1, 2)}
    assert train(tmp_path / "two", tokens, 4, *long).ids == {step: expected.ids[step] for step in (3, 4)}
    first_epoch = [each for ids in expected.ids.values() for each in ids]
    assert len(set(first_epoch)) < len(first_epoch)  # it went on into the next epoch


def test_off_moves_the_run_aside_and_starts_anew(tokens: Path, tmp_path: Path) -> None:
    train(tmp_path, tokens, 2)
    ran = train(tmp_path, tokens, 1, "checkpoint.resume=off")
    assert list(ran.ids) == [1]
    assert list(complete_steps(tmp_path / "run.1" / CHECKPOINTS)) == [1, 2]
    assert list(complete_steps(tmp_path / "run" / CHECKPOINTS)) == [1]


def test_a_finished_run_has_nothing_left_to_do(tokens: Path, tmp_path: Path) -> None:
    expected = train(tmp_path, tokens, 2)
    weights = load_file(tmp_path / "run" / "model.safetensors")
    (tmp_path / "run" / "model.safetensors").unlink()
    ran = train(tmp_path, tokens, 2)
    assert ran.ids == {}
    assert ran.losses == expected.losses
    again = load_file(tmp_path / "run" / "model.safetensors")
    assert again.keys() == weights.keys()
    assert all(torch.equal(again[name], weights[name]) for name in weights)
    assert not (tmp_path / "run.1").exists()


def test_a_finished_run_with_another_spec_is_not_taken_for_it(tokens: Path, tmp_path: Path) -> None:
    train(tmp_path, tokens, 2)
    said = refused(tmp_path, tokens, 2, "train.optimizer.lr=0.5")
    assert "nothing left to train, but the spec is another one" in said
    assert "train.optimizer.lr: 0.01 → 0.5" in said


def test_another_runs_checkpoint_starts_a_run_of_its_own(tokens: Path, tmp_path: Path) -> None:
    expected = train(tmp_path / "one", tokens, 3)
    there = tmp_path / "one" / "run" / CHECKPOINTS / step_name(1)
    ran = train(tmp_path / "two", tokens, 3, f"checkpoint.resume={there}")
    assert ran.ids == {step: expected.ids[step] for step in (2, 3)}
    assert list(complete_steps(tmp_path / "two" / "run" / CHECKPOINTS)) == [2, 3]
    assert list(complete_steps(tmp_path / "one" / "run" / CHECKPOINTS)) == [1, 2, 3]
    assert ran.losses[3] == expected.losses[3]


def test_going_back_sets_later_steps_aside(tokens: Path, tmp_path: Path) -> None:
    expected = train(tmp_path, tokens, 4)
    root = tmp_path / "run" / CHECKPOINTS
    ran = train(tmp_path, tokens, 3, f"checkpoint.resume={root / step_name(1)}", "checkpoint.keep_last=1")
    assert list(ran.ids) == [2, 3]
    assert list(complete_steps(root)) == [3]
    assert {path.name for path in root.iterdir()} == {
        LATEST, step_name(3), *(f"{step_name(step)}.abandoned" for step in (2, 3, 4))
    }  # fmt: skip
    assert ran.losses[3] == expected.losses[3]


def test_a_folder_without_a_checkpoint_is_refused(tokens: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    said = refused(tmp_path, tokens, 2, f"checkpoint.resume={tmp_path / 'other'}")
    assert f"{tmp_path / 'other'} holds no checkpoint" in said
    assert not (tmp_path / "run").exists()


def test_checkpoints_of_something_else_are_refused_by_name(tokens: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "run" / CHECKPOINTS)
    said = refused(tmp_path, tokens, 9)
    assert "step-000007 is a checkpoint of another run" in said
    assert "model.vocab_size: nothing → 300" in said
    assert "data.source" in said


def test_what_a_run_is_may_not_change_and_all_of_it_is_said(tokens: Path, tmp_path: Path) -> None:
    train(tmp_path, tokens, 2)
    before = sorted(path for path in tmp_path.rglob("*"))
    said = refused(tmp_path, tokens, 1, "model.moe.top_k=3", "train.seed=3", "train.tokens_per_step=192")
    for each in ("model.moe.top_k: 2 → 3", "train.seed: 0 → 3", "tokens_per_step: 96 → 192", "it is at step 2, and 1"):
        assert each in said
    assert "fix: use the spec that wrote it, or start anew with --set checkpoint.resume=off" in said
    assert sorted(path for path in tmp_path.rglob("*")) == before


def test_other_data_are_refused(tokens: Path, tmp_path: Path) -> None:
    train(tmp_path, tokens, 1)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("other words " * 2000, encoding="utf-8")
    prepare([tmp_path / "texts"], output=tmp_path / "tokens", vocab_size=270, validation_fraction=0.0)
    assert "holds other data than it was trained on" in refused(tmp_path, tmp_path, 2)


def test_what_is_meant_is_said(tokens: Path, tmp_path: Path) -> None:
    train(tmp_path, tokens, 1)
    printed = train(tmp_path, tokens, 2, "train.optimizer.lr=0.002", "layout.microbatches=2").printed
    assert "train.optimizer.lr: 0.01 → 0.002" in printed
    assert "train.steps: 1 → 2" in printed
    assert "microbatches" not in printed


def test_the_newest_is_what_a_run_means(tmp_path: Path) -> None:
    root = tmp_path / "run" / CHECKPOINTS
    folders = [write_checkpoint(root, step) for step in (9, 10, 1_000_000)]
    (root / "step-2000000.partial").mkdir()
    (root / "step-0000011").mkdir()  # not a name that moegraph gives
    assert find_checkpoint(tmp_path / "run") == find_checkpoint(root) == folders[-1]
    assert find_checkpoint(folders[0]) == folders[0]


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_folder_of_checkpoints_that_is_none_is_refused(tokens: Path, tmp_path: Path, kind: str) -> None:
    train(tmp_path, tokens, 1)
    root = tmp_path / "run" / CHECKPOINTS
    root.rename(tmp_path / "elsewhere")
    root.symlink_to(tmp_path / "elsewhere") if kind == "link" else root.write_text("", encoding="utf-8")
    with pytest.raises(CheckpointError, match="is not a folder of checkpoints: it is a link or a file"):
        train(tmp_path, tokens, 2)


def test_two_runs_cannot_go_on_in_one_folder(tokens: Path, tmp_path: Path) -> None:
    train(tmp_path, tokens, 1)
    with (
        claim_with_start("auto", tmp_path / "run", print),
        pytest.raises(RunError, match="another process is training into"),
    ):
        train(tmp_path, tokens, 2)


def test_a_damaged_newest_checkpoint_stops_the_run_with_nothing_changed(tokens: Path, tmp_path: Path) -> None:
    train(tmp_path, tokens, 2)
    newest = tmp_path / "run" / CHECKPOINTS / step_name(2)
    shard = next(path for path in newest.iterdir() if path.name != MANIFEST)
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    log = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match=f"{shard.name} is damaged") as caught:
        train(tmp_path, tokens, 3)
    assert caught.value.exit_code == 1
    assert f"fix: go on from step 1 with --set checkpoint.resume={newest.with_name(step_name(1))}" in str(caught.value)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == log
    ran = train(tmp_path, tokens, 3, f"checkpoint.resume={newest.with_name(step_name(1))}")
    assert list(ran.ids) == [2, 3]
    assert train(tmp_path, tokens, 4, "checkpoint.verify=false").ids.keys() == {4}


@pytest.mark.parametrize(("saved", "rung"), [(1.25, 0), (1.5, 1), (2.0, 1), (3.0, 2), (64.0, 2)])
def test_buckets_are_as_large_as_they_were(saved: float, rung: int) -> None:
    used: list[int] = []
    engine: Any = SimpleNamespace(capacity=1.25, ladder=[1.25, 2.0, 4.0], _use=used.append)
    Engine.start_at_capacity(engine, saved)
    assert used == [rung]


def test_buckets_without_a_capacity_stay_so() -> None:
    used: list[int] = []
    engine = cast(Any, SimpleNamespace(capacity=None, ladder=[1.25, 4.0], _use=used.append))
    Engine.start_at_capacity(engine, 4.0)
    assert used == []
