"""A run of one rank that can be continued from one moment many times: each attempt is a fork of this process, so it
costs milliseconds, and it may be killed."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moegraph.checkpoint.names import CHECKPOINTS, parse_step
from moegraph.checkpoint.reader import Checkpoint
from moegraph.checkpoint.run_checkpoints import RunCheckpoints
from moegraph.checkpoint.start import claim_with_start
from moegraph.checkpoint.step_folders import complete_steps, read_latest
from moegraph.runtime.progress import Progress
from moegraph.runtime.trainer import Trainer
from moegraph.specs.schema import Spec
from tests.checkpoint.small_checkpoints import CPU, compiled_for

FIRST = 2  # the last step before every attempt: it is saved
_CHANGES = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate")

Body = Callable[["Forks", RunCheckpoints], None]


class Forks:
    """A run after step FIRST. `expected`: per later step, its loss and a hash of the state after it."""

    def __init__(self, spec: Spec, base: Path, folder: Path) -> None:
        self.spec, self.folder, self.attempts = spec, folder, 0
        self.trainer = Trainer(spec, base, CPU, Progress(1, stream=io.StringIO()), compiled_for(spec))
        (folder / "base").mkdir(parents=True)
        self.train(self.checkpoints(folder / "base"), 1, FIRST)
        answer = self.fork(lambda: [self.step(step) for step in range(FIRST + 1, FIRST + 5)])
        self.expected = {FIRST + 1 + i: each for i, each in enumerate(answer)}

    def checkpoints(self, folder: Path) -> RunCheckpoints:
        """Of the run, into a folder."""
        trainer = self.trainer
        return RunCheckpoints(trainer.engine, trainer.loader, trainer.dataset.fingerprint, folder, lambda text: None)

    def train(self, checkpoints: RunCheckpoints, first: int, last: int) -> None:
        """Steps, each saved as the spec says."""
        for step in range(first, last + 1):
            self.record = self.trainer.step(step)
            checkpoints.after_step(step, self.record, self.trainer.expert_counts)
        checkpoints.finish()

    def step(self, step: int) -> list[Any]:
        """One step: its loss, and a hash of all that it left."""
        loss = self.trainer.step(step)["loss"]
        optimizer = self.trainer.engine.state.optimizer
        digest = hashlib.sha256()
        for tensors in (optimizer.masters, optimizer.exp_avg, optimizer.exp_avg_sq, self.trainer.engine.state.values):
            for _, value in sorted(tensors.items()):
                digest.update(value.numpy().tobytes())
        return [loss, digest.hexdigest(), optimizer.steps]

    def killed(self, body: Body, *, after: float | None = None, before_change: int | None = None) -> Path | None:
        """A copy of the run's folder in which `body` was killed: some seconds after it began, or just before it
        changes the disk for the n-th time. None if it came to its end before."""
        copy = self.folder / f"{self.attempts}"
        self.attempts += 1
        shutil.copytree(self.folder / "base", copy)
        ready, say = os.pipe()

        def run() -> None:
            checkpoints = self.checkpoints(copy)
            if before_change is not None:
                _die_before(before_change)
            os.write(say, b"r")
            body(self, checkpoints)

        child = _fork(run)
        os.close(say)
        with open(ready, "rb") as pipe:
            pipe.read(1)
        if after is not None:
            time.sleep(after)
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert status in (0, signal.SIGKILL), f"status {status}: the traceback is above"
        return copy if status else None

    def seconds(self, body: Body) -> float:
        """How long it takes when nothing kills it."""
        began = time.monotonic()
        assert self.killed(body) is None
        return time.monotonic() - began

    def check(self, copy: Path) -> int:
        """Every step that is there is whole, `latest` says one of them, and the run goes on from the newest to the bit,
        from a state of which nothing is left. The step it went on from."""
        root = copy / CHECKPOINTS
        steps = complete_steps(root)
        for path in steps.values():
            Checkpoint.open(path).verify()
        latest = read_latest(root)
        assert latest is not None
        assert parse_step(latest) in steps, (latest, steps)

        def go_on() -> list[Any]:
            forget(self.trainer)
            with claim_with_start("auto", copy, lambda text: None) as start:
                step = self.checkpoints(copy).resume(start)
                return [step, self.step(step + 1), sorted(path.name for path in root.iterdir())]

        step, found, left = self.fork(go_on)
        assert found == self.expected[step + 1], step
        assert all(parse_step(name) is not None or name == "latest" for name in left), left
        return int(step)

    def fork(self, body: Callable[[], Any]) -> Any:
        """What `body` gives in a fork, as JSON."""
        here, there = os.pipe()

        def run() -> None:
            with open(there, "w", encoding="utf-8", closefd=False) as pipe:
                try:
                    answer = {"is": body()}
                except Exception:
                    answer = {"failed": traceback.format_exc()}
                json.dump(answer, pipe)

        child = _fork(run)
        os.close(there)
        with open(here, encoding="utf-8") as pipe:
            text = pipe.read()
        _, status = os.waitpid(child, 0)
        assert status == 0, f"status {status}"
        answer = json.loads(text)
        assert "failed" not in answer, answer["failed"]
        return answer["is"]


def forget(trainer: Trainer) -> None:
    """Nothing of the state is left but its shape."""
    state = trainer.engine.state
    for tensors in (state.optimizer.masters, state.optimizer.exp_avg, state.optimizer.exp_avg_sq):
        tensors.flat.fill_(float("nan"))
    for name in state._biases:
        state.values[name].fill_(float("nan"))
    state.optimizer.steps = -1


def _fork(body: Callable[[], None]) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        body()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _die_before(change: int) -> None:
    """This process is killed when it is about to change the disk for the n-th time (from 0) from now on."""
    left = change

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        writes = event == "open" and arguments[2] is not None and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if writes or event in _CHANGES:
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1

    sys.addaudithook(hook)
