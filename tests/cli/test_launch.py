"""The launcher: what a rank is given, and how a run ends when a rank, the user or the launcher itself ends it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from moegraph.cli.launch import launch
from moegraph.cli.rank_environment import LAUNCH_FD, environment_ranks, watch_launcher
from moegraph.errors import RunError, UsageError

LAUNCHER = """\
import signal, sys
from moegraph.cli import launch
signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the tests were started with
signal.signal(signal.SIGTERM, signal.SIG_DFL)
launch._KILL_SECONDS = 0.3
save = float(sys.argv[4]) if len(sys.argv) > 4 else None
nproc, grace = int(sys.argv[2]), float(sys.argv[3])
status = launch.launch([sys.executable, sys.argv[1]], nproc, grace_seconds=grace, save_seconds=save)
assert "torch" not in sys.modules
sys.exit(status)
"""

# What every rank of these tests starts with. `ready` leaves a file that says which process this is.
RANK = """\
import json, os, signal, sys, time
from pathlib import Path
rank = int(os.environ["RANK"])
def ready():
    path = Path(f"rank{rank}")
    path.with_suffix(".new").write_text(str(os.getpid()))
    path.with_suffix(".new").rename(path)
def others_are_ready():
    while len(list(Path().glob("rank[0-9]"))) < int(os.environ["WORLD_SIZE"]) - 1:
        time.sleep(0.01)
"""


@dataclass(frozen=True)
class Done:
    """How a launched run ended, and how long it took."""

    status: int
    out: str
    err: str
    seconds: float


@dataclass
class Run:
    """A launcher at work in a folder of its own."""

    folder: Path
    process: subprocess.Popen[str]
    began: float

    def pids(self, count: int) -> list[int]:
        """The ranks' processes, once all are ready."""
        paths = [self.folder / f"rank{number}" for number in range(count)]
        _until(lambda: all(path.exists() for path in paths))
        return [int(path.read_text()) for path in paths]

    def done(self) -> Done:
        """Waits for the end."""
        out, err = self.process.communicate(timeout=30)
        return Done(self.process.returncode, out, err, time.monotonic() - self.began)


Start = Callable[..., Run]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a launcher whose ranks run the given lines."""
    runs: list[Run] = []

    def call(source: str, nproc: int, grace: float = 10.0, save: float | None = None, **environment: str) -> Run:
        (tmp_path / "child.py").write_text(RANK + source, encoding="utf-8")
        inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                LAUNCHER,
                "child.py",
                str(nproc),
                str(grace),
                *([str(save)] if save is not None else []),
            ],
            cwd=tmp_path,
            env=inherited | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        runs.append(Run(tmp_path, process, time.monotonic()))
        return runs[-1]

    yield call
    for run in runs:
        run.process.kill()
        run.process.communicate()


def _until(condition: Callable[[], bool], seconds: float = 15.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def _gone(pid: int) -> bool:
    """Whether a process has ended, be it that nobody has asked for its exit status yet."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    path = Path(f"/proc/{pid}/stat")
    try:
        return path.read_text().rsplit(")", 1)[1].split()[0] == "Z" if Path("/proc").exists() else False
    except FileNotFoundError:
        return True


def test_every_rank_gets_the_environment_of_torchrun(start: Start) -> None:
    source = 'Path(f"env{rank}.json").write_text(json.dumps(dict(os.environ)))\n'
    run = start(source, 2, TORCHELASTIC_USE_AGENT_STORE="True")
    assert run.done().status == 0
    found = [json.loads((run.folder / f"env{rank}.json").read_text()) for rank in range(2)]
    for rank, environment in enumerate(found):
        expected = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MOEGRAPH_LAUNCHED": "1",
        }
        assert {name: environment.get(name) for name in expected} == expected
        assert int(environment["OMP_NUM_THREADS"]) >= 1
        assert "TORCHELASTIC_USE_AGENT_STORE" not in environment
    assert found[0]["MASTER_PORT"] == found[1]["MASTER_PORT"]


def test_a_number_of_threads_that_is_set_stays(start: Start) -> None:
    run = start('Path(f"threads{rank}").write_text(os.environ["OMP_NUM_THREADS"])\n', 1, OMP_NUM_THREADS="7")
    assert run.done().status == 0
    assert (run.folder / "threads0").read_text() == "7"


def test_rank_0_can_listen_on_the_port_and_nobody_is_given_it(start: Start) -> None:
    source = """
import socket
port = int(os.environ["MASTER_PORT"])
if rank == 0:
    others = [socket.create_server(("", 0)) for _ in range(100)]
    assert port not in [other.getsockname()[1] for other in others]
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the store does
    server.bind(("", port))
    server.listen()
    ready()
    server.accept()[0].sendall(b"found")
else:
    others_are_ready()
    assert socket.create_connection((os.environ["MASTER_ADDR"], port), timeout=5).recv(5) == b"found"
"""
    done = start(source, 2).done()
    assert (done.status, done.err) == (0, "")


def test_a_failed_rank_stops_the_others(start: Start) -> None:
    source = """
if rank == 2:
    others_are_ready()
    sys.exit(3)
ready()
time.sleep(60)
"""
    run = start(source, 4, 0.2)
    done = run.done()
    assert done.status == 3
    assert done.err.startswith("error: rank 2 ended with exit code 3 after ")
    assert done.err.endswith(" s; the other 3 were stopped\n")
    assert done.seconds < 10
    assert all(_gone(int((run.folder / f"rank{rank}").read_text())) for rank in (0, 1, 3))


@pytest.mark.parametrize(("code", "status"), [(1, 1), (2, 2), (77, 1)])
def test_the_status_is_the_failed_ranks_where_it_is_one_of_ours(start: Start, code: int, status: int) -> None:
    done = start(f"sys.exit({code})", 1).done()
    assert done.status == status
    assert done.err.startswith(f"error: rank 0 ended with exit code {code} after ")
    assert done.err.endswith(" s\n")


def test_others_that_notice_the_failure_say_so_and_end_by_themselves(start: Start) -> None:
    source = """
if rank == 0:
    ready()
    sys.exit(1)
others_are_ready()
time.sleep(0.5)
print("step 7, all_reduce: lost a peer", file=sys.stderr)
sys.exit(2)
"""
    done = start(source, 2).done()
    assert done.status == 1
    assert done.err.splitlines()[0] == "[rank 1] step 7, all_reduce: lost a peer"
    assert done.err.splitlines()[1].startswith("error: rank 0 ended with exit code 1 after ")
    assert done.err.endswith("; the other rank ended without being stopped\n")


def test_a_rank_that_ignores_sigterm_is_killed_with_what_it_started(start: Start) -> None:
    source = """
import subprocess
if rank == 0:
    others_are_ready()
    sys.exit(1)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
Path("helper").write_text(str(subprocess.Popen(["sleep", "60"]).pid))
ready()
time.sleep(60)
"""
    run = start(source, 2, 0.1)
    done = run.done()
    assert done.status == 1
    assert done.err.endswith("; the other rank was stopped\n")
    _until(lambda: _gone(int((run.folder / "helper").read_text())))


def test_a_killed_rank_is_named_with_the_signal(start: Start) -> None:
    source = """
if rank == 1:
    others_are_ready()
    os.kill(os.getpid(), signal.SIGKILL)
ready()
time.sleep(60)
"""
    done = start(source, 3, 0.1).done()
    assert done.status == 1
    assert done.err.startswith("error: rank 1 was killed by SIGKILL after ")
    assert done.err.endswith(" s; the other 2 were stopped\n")


def test_only_rank_0_writes_to_stdout_and_other_ranks_stderr_has_their_rank(start: Start) -> None:
    source = """
print("result", rank)
sys.stderr.write(f"note {rank}\\n")  # in one piece
sys.stderr.write("no newline")
"""
    done = start(source, 3).done()
    assert done.status == 0
    assert done.out == "result 0\n"
    lines = [f"[rank {rank}] {text}" for rank in (1, 2) for text in (f"note {rank}", "no newline")]
    assert all(f"{line}\n" in done.err for line in lines)
    assert "note 0\n" in done.err
    assert "[rank 0]" not in done.err


def test_the_last_lines_of_a_failed_ranks_stdout_are_shown(start: Start) -> None:
    source = """
if rank == 0:
    time.sleep(60)
for number in range(1000):
    print("line", number)
sys.exit(1)
"""
    lines = start(source, 2, 0.0).done().err.splitlines()
    assert lines[0] == "[rank 1] its stdout ended with:"
    assert lines[1:-1] == [f"[rank 1] line {number}" for number in range(980, 1000)]


def test_a_line_without_end_is_forwarded_in_pieces(start: Start) -> None:
    done = start('sys.stderr.write("x" * 100_000 if rank else "")\n', 2).done()
    lines = done.err.splitlines()
    assert len(lines) > 10
    assert all(line.startswith("[rank 1] x") for line in lines)
    assert sum(line.count("x") for line in lines) == 100_000


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_reaches_each_rank_once(start: Start, number: signal.Signals, status: int) -> None:
    source = """
got = []
signal.signal(signal.SIGINT, lambda number, frame: got.append(number))
signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))
ready()
while not got:
    time.sleep(0.01)
time.sleep(0.5)
sys.stderr.write("saved after " + str(int(got[0])) + "\\n" if len(got) == 1 else "twice\\n")  # in one piece
sys.exit(1)
"""
    run = start(source, 2)
    run.pids(2)
    run.process.send_signal(number)
    time.sleep(0.1)
    run.process.send_signal(signal.SIGINT)  # an impatient user
    done = run.done()
    assert done.status == status
    assert sorted(done.err.splitlines()) == [f"[rank 1] saved after {int(number)}", f"saved after {int(number)}"]


SAVES = """
got = []
for each in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(each, lambda number, frame: got.append(number))
ready()
while signal.SIGTERM not in got:
    time.sleep(0.01)
time.sleep(0.6)
sys.exit(CODES[rank])
"""


@pytest.mark.parametrize(("codes", "status"), [((143, 143), 143), ((0, 0), 0), ((143, 1), 1), ((3, 143), 3)])
def test_ranks_that_save_have_longer_than_the_grace_and_the_last_word(
    start: Start, codes: tuple[int, int], status: int
) -> None:
    run = start(SAVES.replace("CODES", str(codes)), 2, 0.2, 20.0)
    run.pids(2)
    run.process.send_signal(signal.SIGUSR1)  # passed on, and no reason to end
    time.sleep(0.3)
    assert run.process.poll() is None
    run.process.send_signal(signal.SIGTERM)
    run.process.send_signal(signal.SIGTERM)
    assert run.done().status == status


def test_ctrl_c_cuts_the_time_to_save_short(start: Start) -> None:
    run = start("signal.signal(signal.SIGTERM, signal.SIG_IGN)\nready()\ntime.sleep(60)\n", 2, 0.2, 60.0)
    pids = run.pids(2)
    run.process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    run.process.send_signal(signal.SIGINT)
    assert run.done().status == 130
    assert all(map(_gone, pids))


def test_ranks_that_do_not_end_after_ctrl_c_are_killed(start: Start) -> None:
    run = start("signal.signal(signal.SIGINT, signal.SIG_IGN)\nready()\ntime.sleep(60)\n", 2, 0.2)
    pids = run.pids(2)
    run.process.send_signal(signal.SIGINT)
    done = run.done()
    assert (done.status, done.err) == (130, "")
    assert all(map(_gone, pids))


HOLDS_THE_LOCK = "import ctypes; ready(); ctypes.PyDLL(None).sleep(60)"


@pytest.mark.parametrize(
    "work",
    [
        "ready(); time.sleep(60)",
        pytest.param(HOLDS_THE_LOCK, marks=pytest.mark.skipif(sys.platform != "linux", reason="needs prctl")),
    ],
    ids=["waiting", "holding the interpreter's lock"],
)
def test_no_rank_outlives_a_killed_launcher(start: Start, work: str) -> None:
    run = start(f"from moegraph.cli.rank_environment import watch_launcher\nwatch_launcher()\n{work}\n", 2)
    pids = run.pids(2)
    run.process.kill()
    _until(lambda: all(map(_gone, pids)), 5)


def test_the_pipe_alone_ends_a_rank() -> None:
    source = "from moegraph.cli.rank_environment import watch_launcher as watch; import time; watch(); time.sleep(60)"
    reads, writes = os.pipe()
    environment = {**os.environ, LAUNCH_FD: str(reads)}
    process = subprocess.Popen([sys.executable, "-c", source], env=environment, pass_fds=(reads,))
    os.close(reads)
    os.close(writes)
    assert process.wait(timeout=15) == 1


def test_without_a_launcher_there_is_nothing_to_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LAUNCH_FD, raising=False)
    watch_launcher()
    for text in ("pipe", "-1", "99999", "9" * 30):
        monkeypatch.setenv(LAUNCH_FD, text)
        with pytest.raises(UsageError, match=LAUNCH_FD):
            watch_launcher()


def test_calls_that_cannot_work_are_refused(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(UsageError, match="at least 1"):
        launch([sys.executable], 0)
    with pytest.raises(RunError, match="rank 0 could not be started"):
        launch([str(tmp_path / "missing")], 2)
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_environment_says_which_rank_this_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert environment_ranks() is None
    monkeypatch.setenv("RANK", "3")
    assert environment_ranks() is None
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert environment_ranks() == (3, 4)


@pytest.mark.parametrize(
    ("rank", "world"), [("4", "4"), ("-1", "4"), ("", "4"), ("0", "0"), ("one", "4"), ("0", "2.0"), ("1_0", "20")]
)
def test_an_environment_that_makes_no_sense_is_refused(monkeypatch: pytest.MonkeyPatch, rank: str, world: str) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", world)
    with pytest.raises(UsageError, match="0 <= RANK < WORLD_SIZE"):
        environment_ranks()
