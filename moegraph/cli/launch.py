"""The processes of one training run on one host: started together, watched, and ended together.

Contract: `launch` starts a process per rank with the environment that torchrun would give it, and returns when all have
ended. Rank 0 has our stdout and stderr. The others' stderr appears on ours, each line with its rank before it; of their
stdout the last lines of the rank that failed first are shown, and nothing else. No rank outlives the launcher:

1. A rank that fails: the others have `grace_seconds` to notice it and to say in which step they were, then SIGTERM,
   then SIGKILL; one sentence says which rank failed first.
2. Ctrl-C or SIGTERM: passed on once to every rank, then the same grace, then SIGKILL. A second one changes nothing.
   With `save_seconds`, ranks have that long after SIGTERM to save what they have, and Ctrl-C cuts it short.
   SIGUSR1 is passed on each time, and ends nothing.
3. The launcher is killed: a pipe that only it holds open closes, and the ranks that called `watch_launcher` end.

Imports neither torch nor anything that does.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from types import FrameType
from typing import IO

from moegraph.cli.rank_environment import held_port, rank_environment
from moegraph.errors import RunError, UsageError

_TAIL_LINES = 20
_LINE_BYTES = 8192  # a longer line is forwarded in pieces, so that no rank's output can fill our memory
_KILL_SECONDS = 5.0  # from SIGTERM to SIGKILL, and from there until a process that does not end is left behind

_writing = threading.Lock()


@dataclass(eq=False, slots=True)
class _Rank:
    """One process. `code` is None while it runs, and minus the signal's number if one killed it."""

    number: int
    process: subprocess.Popen[bytes]
    code: int | None = None
    ended: float = 0.0  # time.monotonic()
    stdout_tail: deque[str] = field(default_factory=lambda: deque(maxlen=_TAIL_LINES))
    readers: list[threading.Thread] = field(default_factory=list)
    stopped: bool = False


# What the supervisor waits for: a rank that ended, or the number of a signal that we were sent.
_Events = SimpleQueue[_Rank | int]


def launch(
    command: Sequence[str], nproc: int, *, grace_seconds: float = 10.0, save_seconds: float | None = None
) -> int:
    """Runs `command` as `nproc` ranks and returns an exit status; to be called from the main thread.

    0: every rank ended with 0. 1, 2 or 3: a rank failed; 2 and 3 are its own status, anything else is 1. 130 and 143:
    we were sent SIGINT or SIGTERM; with `save_seconds`, after SIGTERM a rank's 1, 2 or 3 comes first, and 0 is 0.
    Raises UsageError for `nproc` < 1, RunError if a process cannot be started.
    """
    if nproc < 1:
        raise UsageError(f"{nproc} processes were asked for: at least 1 is needed")
    sys.stdout.flush()
    began = time.monotonic()
    events: _Events = SimpleQueue()
    ranks: list[_Rank] = []
    watched, held_open = os.pipe()
    try:
        with _signals_to(events), held_port() as port:
            for number in range(nproc):
                ranks.append(_start(command, rank_environment(number, nproc, port, watched), number, watched))
            for rank in ranks:
                _watch(rank, events)
            failed, received = _supervise(ranks, events, grace_seconds, save_seconds)
            _finish_reading(ranks)
    finally:
        for rank in ranks:
            if rank.process.poll() is None:
                _kill(rank)
        os.close(watched)
        os.close(held_open)
    if failed is not None:
        _report(failed, ranks, failed.ended - began)
    if received == signal.SIGTERM and save_seconds is not None:
        own = [rank.code for rank in ranks if rank.code in (1, 2, 3)]
        return own[0] if own else 0 if all(rank.code == 0 for rank in ranks) else 128 + received
    if received:
        return 128 + received
    if failed is not None:
        return failed.code if failed.code in (2, 3) else 1
    return 0


@contextmanager
def _signals_to(events: _Events) -> Iterator[None]:
    """SIGINT, SIGTERM and SIGUSR1 become events; one that is ignored (a job in the background) stays ignored."""

    def put(number: int, frame: FrameType | None) -> None:
        events.put(number)

    wanted = [
        each for each in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1) if signal.getsignal(each) is not signal.SIG_IGN
    ]
    before = [(each, signal.signal(each, put)) for each in wanted]
    try:
        yield
    finally:
        for each, handler in before:
            signal.signal(each, signal.SIG_DFL if handler is None else handler)


def _start(command: Sequence[str], environment: Mapping[str, str], number: int, watched: int) -> _Rank:
    output = None if number == 0 else subprocess.PIPE
    try:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=(watched,),
            start_new_session=True,  # a terminal's Ctrl-C reaches the launcher only, and each rank once, from us
        )
    except OSError as error:
        raise RunError(f"rank {number} could not be started: {error}") from error
    return _Rank(number, process)


def _watch(rank: _Rank, events: _Events) -> None:
    """Starts the threads that read what a rank writes and wait for its end."""

    def wait() -> None:
        code = rank.process.wait()
        rank.ended, rank.code = time.monotonic(), code
        events.put(rank)

    def show(line: str) -> None:
        _write([f"[rank {rank.number}] {line}"])

    for stream, use in ((rank.process.stdout, rank.stdout_tail.append), (rank.process.stderr, show)):
        if stream is not None:
            rank.readers.append(_thread(_read, stream, use))
    _thread(wait)


def _thread(target: Callable[..., None], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=target, args=arguments, daemon=True)
    thread.start()
    return thread


def _read(stream: IO[bytes], use: Callable[[str], None]) -> None:
    with stream:
        while line := stream.readline(_LINE_BYTES):
            use(line.decode("utf-8", "replace").rstrip("\r\n"))


def _finish_reading(ranks: Sequence[_Rank]) -> None:
    deadline = time.monotonic() + 1.0  # a process that a rank left behind may hold its pipe open
    for rank in ranks:
        for reader in rank.readers:
            reader.join(max(0.0, deadline - time.monotonic()))


def _write(lines: Sequence[str]) -> None:
    # Nobody may read our stderr any more; the ranks' pipes have to be emptied all the same.
    with _writing, suppress(OSError, ValueError):
        sys.stderr.write("".join(f"{line}\n" for line in lines))
        sys.stderr.flush()


def _supervise(ranks: Sequence[_Rank], events: _Events, grace: float, save: float | None) -> tuple[_Rank | None, int]:
    """Until every rank has ended: the rank that failed before anything else went wrong, and the signal we were sent."""
    running = set(ranks)
    failed: _Rank | None = None
    received = 0
    # What is done to the ranks that still run, and when; signal 0 is to give up on them.
    plan: deque[tuple[float, int]] = deque()
    while running:
        try:
            event = events.get(timeout=max(0.0, plan[0][0] - time.monotonic()) if plan else None)
        except Empty:
            number = plan.popleft()[1]
            if not number:
                break
            _send(running, number)
            continue
        now = time.monotonic()
        if isinstance(event, _Rank):
            running.discard(event)
            if (event.code or 0) < 0:
                _kill(event)  # it could not end what it had started
            if event.code and failed is None and not received:
                failed = event
                killed = now + grace + _KILL_SECONDS
                plan = deque([(now + grace, signal.SIGTERM), (killed, signal.SIGKILL), (killed + _KILL_SECONDS, 0)])
        elif event == signal.SIGUSR1:
            _send(running, event, stops=False)
        elif not received or (save is not None and (received, event) == (signal.SIGTERM, signal.SIGINT)):
            received = event
            _send(running, received)
            killed = now + (save if save is not None and received == signal.SIGTERM else grace)
            plan = deque([(killed, signal.SIGKILL), (killed + _KILL_SECONDS, 0)])
    return failed, received


def _send(running: set[_Rank], number: int, *, stops: bool = True) -> None:
    for rank in running:
        rank.stopped |= stops
        if number == signal.SIGKILL:
            _kill(rank)
        else:
            with suppress(ProcessLookupError):
                rank.process.send_signal(number)  # to the rank alone: what it started is its own to end


def _kill(rank: _Rank) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(rank.process.pid, signal.SIGKILL)  # and whatever it started


def _report(failed: _Rank, ranks: Sequence[_Rank], seconds: float) -> None:
    """Last lines of the failed rank's stdout, and the one sentence about the run."""
    lines = [f"[rank {failed.number}] {line}" for line in list(failed.stdout_tail)]
    if lines:
        lines.insert(0, f"[rank {failed.number}] its stdout ended with:")
    code = failed.code or 0
    how = f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
    lines.append(f"error: rank {failed.number} {how} after {seconds:.1f} s{_others(failed, ranks)}")
    _write(lines)


def _others(failed: _Rank, ranks: Sequence[_Rank]) -> str:
    others = [rank for rank in ranks if rank is not failed]
    if not others:
        return ""
    stopped = sum(rank.stopped for rank in others)
    which = "the other" if stopped in (0, len(others)) else f"{stopped} of the other"
    which += " rank" if len(others) == 1 else f" {len(others)}"
    were = "was" if stopped == 1 else "were"
    text = f"; {which} {were} stopped" if stopped else f"; {which} ended without being stopped"
    left = [f"rank {rank.number} (process {rank.process.pid})" for rank in others if rank.code is None]
    return text + (f", but not even SIGKILL ended {', '.join(left)}" if left else "")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
