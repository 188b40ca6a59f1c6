"""A pool of processes that are the ranks of a run (gloo, CPU), kept for a whole test session: starting them is what
takes time. `RankPool.run(world, function, *arguments)` calls `function(mesh-making arguments …)` on each of `world` of
them and returns what each gave; functions and arguments are picklable, functions are top-level in a test module."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

TIMEOUT = 120.0


class RankFailed(AssertionError):
    """A rank raised: its traceback."""


class RankPool:
    """Up to `most` processes, started when they are first wanted."""

    def __init__(self, most: int = 4) -> None:
        self.most = most
        self._context = multiprocessing.get_context("spawn")
        self._workers: list[tuple[Any, Connection]] = []

    def run(self, world: int, function: Callable[..., Any], *arguments: Any, timeout: float = TIMEOUT) -> list[Any]:
        """`function(rank, *arguments)` on ranks 0 … world - 1 with the environment of torchrun; what each returns.

        Raises RankFailed for the first rank that raised, and when one does not answer in time.
        """
        self._start(world)
        port = free_port()
        for rank in range(world):
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world),
                "LOCAL_WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            self._workers[rank][1].send((environment, function, arguments))
        answers: dict[int, Any] = {}
        waiting = {self._workers[rank][1]: rank for rank in range(world)}
        while waiting:
            ready = wait(list(waiting), timeout)
            if not ready:
                self.close()
                raise RankFailed(f"ranks {sorted(waiting.values())} gave no answer in {timeout:g} s")
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    answers[rank] = connection.recv()
                except EOFError:
                    answers[rank] = ("error", f"rank {rank} has ended")
        failed = [answers[rank][1] for rank in range(world) if answers[rank][0] == "error"]
        if failed:
            self.close()
            raise RankFailed("\n".join(failed))
        return [answers[rank][1] for rank in range(world)]

    def close(self) -> None:
        """Ends the processes."""
        for process, connection in self._workers:
            connection.close()
            process.terminate()
        for process, _ in self._workers:
            process.join(10)
        self._workers = []

    def _start(self, world: int) -> None:
        assert world <= self.most
        while len(self._workers) < world:
            here, there = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(there,), daemon=True)
            process.start()
            there.close()
            self._workers.append((process, here))


def _serve(connection: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            environment, function, arguments = connection.recv()
        except EOFError:
            return
        os.environ.update(environment)
        try:
            answer = ("ok", function(int(environment["RANK"]), *arguments))
        except BaseException:
            answer = ("error", f"rank {environment['RANK']}:\n{traceback.format_exc()}")
        connection.send(answer)


def free_port() -> int:
    """A port that was free a moment ago."""
    import socket

    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port: int = server.getsockname()[1]
        return port
