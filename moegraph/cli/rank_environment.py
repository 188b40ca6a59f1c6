"""What a rank is told through its environment: by `launch`, which writes it, or by torchrun; and how it reads that.

Imports neither torch nor anything that does.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from moegraph.errors import UsageError

LAUNCHED = "MOEGRAPH_LAUNCHED"  # in a rank's environment: it was started by `launch`
LAUNCH_FD = "MOEGRAPH_LAUNCH_FD"  # the pipe that closes when the launcher is gone

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@contextmanager
def held_port() -> Iterator[int]:
    """A port for rank 0's TCPStore.

    On Linux our socket keeps it, bound but not listening, for as long as the ranks run: the kernel then gives it to
    nobody who asks for any port, nor to an outgoing connection, and yet the store can listen on it, since both sockets
    have SO_REUSEADDR. So there is no moment at which the port is free. (torchrun closes that gap by hosting the store
    itself, which here would cost the launcher torch's import and every rank its ordinary `env://`.) Other systems
    refuse or shadow the second socket: there it is closed just before the ranks start.
    """
    try:
        holder = _bound(socket.AF_INET6, "::")
    except OSError:  # a host without IPv6
        holder = _bound(socket.AF_INET, "0.0.0.0")
    with holder:
        port = int(holder.getsockname()[1])
        if sys.platform != "linux":
            holder.close()
        yield port


def _bound(family: socket.AddressFamily, every_address: str) -> socket.socket:
    holder = socket.socket(family)
    try:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # and every IPv4 address
        holder.bind((every_address, 0))
    except OSError:
        holder.close()
        raise
    return holder


def rank_environment(number: int, nproc: int, port: int, watched: int) -> Mapping[str, str]:
    """What rank `number` of `nproc` is started with; `watched` is its end of the pipe to the launcher."""
    # What another launcher says about its own store and its own error files is not for our ranks.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // nproc)))
    return environment | {
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        LAUNCHED: "1",
        LAUNCH_FD: str(watched),
    }


def watch_launcher() -> None:
    """Ends this process when its launcher is gone. A rank calls it first thing; without a launcher it does nothing."""
    text = os.environ.pop(LAUNCH_FD, None)  # not for the processes that this one starts
    if text is None:
        return
    try:
        fd = int(text)
        os.set_inheritable(fd, False)
    except (ValueError, OSError, OverflowError):
        raise UsageError(f"{LAUNCH_FD} is {text!r} in the environment, which is no open pipe: unset it") from None
    # The pipe works on every system and whatever stands between the launcher and us, but its thread needs the
    # interpreter's lock, and a library that hangs may hold that for ever. So on Linux the kernel is asked as well; by
    # the rank about itself, as a preexec_fn would run Python between fork and exec, beside the launcher's threads.
    # A launcher that died before this line is seen by the pipe.
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    threading.Thread(target=_end_when_closed, args=(fd,), daemon=True, name="watch-launcher").start()


def environment_ranks() -> tuple[int, int] | None:
    """(rank, world size) of a process that torchrun or `launch` started, else None. Raises UsageError for nonsense."""
    rank, world = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank is None or world is None:
        return None
    if all(re.fullmatch("[0-9]{1,9}", text) for text in (rank, world)) and int(rank) < int(world):
        return int(rank), int(world)
    raise UsageError(
        f"the environment has RANK={rank!r} and WORLD_SIZE={world!r}, which have to be whole numbers with "
        "0 <= RANK < WORLD_SIZE: unset both to train with one process, or start the ranks with --nproc or torchrun"
    )


def _end_when_closed(fd: int) -> None:
    os.read(fd, 1)  # nobody ever writes: this returns at the end of the file
    os._exit(1)
