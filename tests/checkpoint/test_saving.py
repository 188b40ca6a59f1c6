"""Saving: in the background or not, one at a time, and what stops a run when it cannot be done."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moegraph.checkpoint import saver as saver_module
from moegraph.checkpoint import shard_writer
from moegraph.checkpoint.names import CHECKPOINTS, LATEST, Segment, step_name
from moegraph.checkpoint.reader import Checkpoint
from moegraph.checkpoint.shard_writer import HostCopy, write_shard
from moegraph.checkpoint.step_folders import complete_steps
from moegraph.data.loader import StepBatch
from moegraph.errors import CheckpointError, RunError
from moegraph.runtime.agree import Agreed
from moegraph.runtime.engine import Engine
from moegraph.runtime.model_state import ModelState
from tests.checkpoint.small_checkpoints import Ran, run_spec, train_rank
from tests.ranks import RankPool

MODES = ["sync", "async"]


def saved(folder: Path) -> list[int]:
    """The steps that are there, each of them whole."""
    steps = complete_steps(folder / "run" / CHECKPOINTS)
    for path in steps.values():
        Checkpoint.open(path).verify()
    return list(steps)


def names(folder: Path) -> set[str]:
    return {path.name for path in (folder / "run" / CHECKPOINTS).iterdir()}


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Within, this process can write no file beyond this size: the system's own error in the middle of a write."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("mode", MODES)
def test_the_last_ones_and_every_nth_stay(tokens: Path, tmp_path: Path, mode: str) -> None:
    options = [f"checkpoint.mode={mode}", "checkpoint.every=2", "checkpoint.keep_last=2", "checkpoint.keep_every=4"]
    train_rank(0, run_spec(tmp_path, *options, "train.steps=11"), tokens)
    assert saved(tmp_path) == [4, 8, 10, 11]  # the last step is saved too
    root = tmp_path / "run" / CHECKPOINTS
    assert (root / LATEST).read_text(encoding="ascii") == "step-000011\n"
    assert names(tmp_path) == {LATEST, *map(step_name, (4, 8, 10, 11))}


def test_without_every_nothing_is_saved(tokens: Path, tmp_path: Path) -> None:
    train_rank(0, run_spec(tmp_path, "checkpoint.every=null", "train.steps=2"), tokens)
    assert not (tmp_path / "run" / CHECKPOINTS).exists()


def test_the_manifest_says_what_the_step_reported(tokens: Path, tmp_path: Path) -> None:
    ran: Ran = train_rank(0, run_spec(tmp_path, "train.steps=2"), tokens)
    manifest = Checkpoint.open(tmp_path / "run" / CHECKPOINTS / step_name(2)).manifest
    assert manifest.numbers.loss == ran.losses[2]
    assert manifest.numbers.grad_norm > 0
    assert [sum(row) for row in manifest.numbers.expert_counts] == [sum(manifest.numbers.expert_counts[0])] * 2
    assert (manifest.data.samples, manifest.data.seed) == (32, 0)
    assert manifest.counters.optimizer_steps == 2
    assert manifest.spec["model"]["d_model"] == 8


@pytest.mark.parametrize("mode", MODES)
def test_a_file_that_cannot_be_written_whole_stops_the_run(tokens: Path, tmp_path: Path, mode: str) -> None:
    how = f"checkpoint.mode={mode}"
    train_rank(0, run_spec(tmp_path, how, "train.steps=2"), tokens)
    with largest_file(16384), pytest.raises(CheckpointError) as caught:
        train_rank(0, run_spec(tmp_path, how, "train.steps=9"), tokens)
    said = str(caught.value)
    assert "step 3: the checkpoint could not be written to" in said
    assert "(File too large); those of earlier steps are whole" in said
    assert saved(tmp_path) == [1, 2]
    assert names(tmp_path) == {LATEST, step_name(1), step_name(2)}  # no part of it is left
    assert train_rank(0, run_spec(tmp_path, how, "train.steps=3"), tokens).ids.keys() == {3}


def test_too_little_free_space_is_said_before_anything_is_written(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver_module, "free_bytes", lambda folder: 3 << 20)
    train_rank(0, run_spec(tmp_path, "train.steps=1"), tokens)
    monkeypatch.setattr(saver_module, "free_bytes", lambda folder: 100_000)
    with pytest.raises(CheckpointError, match=r"step 2: a checkpoint needs 1\.\d MiB and .* has 0\.1 MiB free"):
        train_rank(0, run_spec(tmp_path, "train.steps=2"), tokens)
    assert names(tmp_path) == {LATEST, step_name(1)}


def test_a_file_system_that_is_full(tokens: Path, tmp_path: Path) -> None:
    """A real one of 2 MiB; where it may not be mounted, the two tests above stand for it."""
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(small)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no file system may be mounted here")
    try:
        with pytest.raises(CheckpointError, match=r"step [2-9]: a checkpoint needs"):
            train_rank(0, run_spec(small, "train.steps=40"), tokens)
        assert saved(small) != []
    finally:
        subprocess.run(["umount", str(small)], check=True)


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_folder_that_cannot_be_written_to(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    original = Path.mkdir

    def mkdir(path: Path, *arguments: Any, **options: Any) -> None:
        if CHECKPOINTS in str(path):
            raise OSError(number, os.strerror(number), str(path))
        original(path, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with pytest.raises(CheckpointError, match=rf"step 1: .*\({os.strerror(number)}\)"):
        train_rank(0, run_spec(tmp_path, "train.steps=2"), tokens)


def fail_on_rank_1(rank: int, spec: Any, base: Path, elsewhere: bool) -> str:
    """Trains; the disk of rank 1 is full, or a disk of its own. What each rank raised."""
    if rank == 1:

        def full(*arguments: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def own(path: Path, tensors: dict[Segment, torch.Tensor]) -> shard_writer.Written:
            written = write_shard(path, tensors)
            path.unlink()
            return written

        original = shard_writer.write_shard
        shard_writer.write_shard = own if elsewhere else full  # type: ignore[assignment]
    try:
        train_rank(rank, spec, base)
    except RunError as error:
        return f"RunError: {error}"
    except CheckpointError as error:
        return f"CheckpointError: {error}"
    finally:
        if rank == 1:
            shard_writer.write_shard = original
    return "nothing"


@pytest.mark.parametrize("mode", MODES)
def test_one_rank_that_cannot_write_stops_all_and_is_named(
    ranks: RankPool, tokens: Path, tmp_path: Path, mode: str
) -> None:
    spec = run_spec(tmp_path, f"checkpoint.mode={mode}", "train.steps=9", dp=2, ep=2)
    first, second = ranks.run(2, fail_on_rank_1, spec, tokens, False)
    assert "CheckpointError: step 1: the checkpoint could not be written" in second
    assert "No space left on device" in second
    assert "RunError: rank 0: writing the checkpoint of step 1 failed on rank 1" in first
    assert names(tmp_path) == set()


def test_ranks_with_disks_of_their_own_are_told_so(ranks: RankPool, tokens: Path, tmp_path: Path) -> None:
    first, second = ranks.run(2, fail_on_rank_1, run_spec(tmp_path, dp=2, ep=2), tokens, True)
    assert "shard-00001-of-00002.safetensors is not what its rank wrote, seen from rank 0" in first
    assert "completing the checkpoint of step 1 failed on rank 0" in second
    assert names(tmp_path) == set()


def test_training_goes_on_while_one_checkpoint_at_a_time_is_written(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one of step 4 is held up until step 8 is to be saved."""
    gate = threading.Event()
    running: list[int] = []
    most: list[int] = []

    def slow(path: Path, tensors: dict[Segment, torch.Tensor]) -> shard_writer.Written:
        running.append(1)
        most.append(len(running))
        before = {segment: tensor.clone() for segment, tensor in tensors.items()}
        assert gate.wait(30)
        time.sleep(0.05)
        assert all(torch.equal(before[segment], tensor) for segment, tensor in tensors.items())  # nobody changes it
        written = write_shard(path, tensors)
        running.pop()
        return written

    unfinished: list[int] = []
    poll, save = saver_module.Saver.poll, saver_module.Saver.save

    def polling(self: saver_module.Saver) -> None:
        unfinished.extend([self._step] * (self._job is not None and not self._job.done))
        poll(self)

    def saving(self: saver_module.Saver, step: int, content: dict[str, Any]) -> None:
        if step == 8:
            assert saved(tmp_path) == []
            gate.set()
        save(self, step, content)

    monkeypatch.setattr(shard_writer, "write_shard", slow)
    monkeypatch.setattr(saver_module.Saver, "poll", polling)
    monkeypatch.setattr(saver_module.Saver, "save", saving)
    spec = run_spec(tmp_path, "checkpoint.mode=async", "checkpoint.every=4", "train.steps=12")
    train_rank(0, spec, tokens)
    assert saved(tmp_path) == [4, 8, 12]
    assert most == [1, 1, 1]
    assert unfinished.count(4) >= 4  # steps 5 to 8 ended while it was being written


def test_a_step_that_is_not_finite_loses_no_checkpoint_that_was_being_written(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Engine.compute

    def compute(self: Engine, batch: StepBatch) -> Agreed:
        agreed = original(self, batch)
        return replace(agreed, loss=float("nan")) if self.state.optimizer.steps == 2 else agreed

    monkeypatch.setattr(Engine, "compute", compute)
    with pytest.raises(RunError, match="step 3: loss is nan"):
        train_rank(0, run_spec(tmp_path, "checkpoint.mode=async", "train.steps=4"), tokens)
    assert saved(tmp_path) == [1, 2]


def test_no_step_is_committed_before_it_waits_for_the_copy(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[str] = []
    hold, begin, commit = HostCopy.hold, HostCopy.begin, ModelState.commit

    def said(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            happened.append(name)
            return original(*args)

        return call

    monkeypatch.setattr(HostCopy, "hold", said("hold", hold))
    monkeypatch.setattr(HostCopy, "begin", said("copy", begin))
    monkeypatch.setattr(ModelState, "commit", said("commit", commit))
    train_rank(0, run_spec(tmp_path, "checkpoint.mode=async", "train.steps=3"), tokens)
    assert happened == ["hold", "commit", "copy"] * 3


def test_the_copy_in_host_memory_is_made_once() -> None:
    copy = HostCopy()
    tensors = {Segment("master.a", 0, 5): torch.arange(5.0), Segment("exp_avg.a", 0, 5): torch.ones(5).bfloat16()}
    first = copy.begin(tensors)
    places = {segment: tensor.data_ptr() for segment, tensor in first.items()}
    for tensor in tensors.values():
        tensor.add_(1)
    assert all(not torch.equal(first[segment], tensor) for segment, tensor in tensors.items())
    second = copy.begin(tensors)
    assert {segment: tensor.data_ptr() for segment, tensor in second.items()} == places
    assert all(torch.equal(second[segment], tensor) for segment, tensor in tensors.items())
