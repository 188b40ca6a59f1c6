"""A world of ranks simulated in one process: a thread for each, in lockstep, and collectives through memory.

    World(2).run(work)      rank 0: work(rank) ──▶ all_to_all ┐            ┌ ──▶ result
                            rank 1: work(rank) ──▶ all_to_all ┴ they meet  ┴ ──▶ result

Every collective is a meeting of all ranks, and so is the end of a rank's work. At each meeting the calls are compared:
all ranks must be at the same node, with the same operator, group, dtype and row width, and each must send what the
others expect. What does not agree is a `CheckFailed` that names the nodes of both ranks, where real ranks would wait
for ever or take one number for another. A rank that raises ends the meeting, so nothing hangs. The ranks share no state
but these meetings, so results are the same in every run.

This stands for one group of ranks (`ep`); other groups of the same axis do the same with other tokens. An
`exact_exchange` is simulated as the exchange of whole buckets that it stands for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from moegraph.errors import CheckFailed
from moegraph.ops.exchange import peers_of_thread, simulated

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Call:
    """One collective as one rank issues it: where in the graph, and what it sends and expects. Sizes are in rows."""

    node: str
    operator: str
    group: str
    receive: tuple[int, ...]
    send: tuple[int, ...]
    dtype: torch.dtype
    width: tuple[int, ...]

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return f"{self.node} = {self.operator}({kind}{[sum(self.send), *self.width]}, {self.group!r})"


class Rank:
    """One rank of a simulated world: the `Peers` that its thread's collectives go through, and the calls it made."""

    def __init__(self, world: World, index: int) -> None:
        self.world, self.index = world, index
        self.calls: list[Call] = []
        self._node, self._operator = "", "all_to_all"

    def at(self, node: str, operator: str) -> None:
        """Says which node runs next, for what is reported."""
        self._node, self._operator = node, operator

    def all_to_all(self, x: Tensor, receive: Sequence[int], send: Sequence[int], group: str) -> Tensor:
        """What every rank sent to this one, in their order. Raises `CheckFailed` in every rank where they disagree."""
        call = Call(self._node, self._operator, group, tuple(receive), tuple(send), x.dtype, tuple(x.shape[1:]))
        if sum(send) != x.shape[0] or not len(send) == len(receive) == self.world.size:
            raise CheckFailed(
                f"rank {self.index}: {call} has {x.shape[0]} rows, sends {list(send)} and expects {list(receive)} in "
                f"a group of {self.world.size} ranks"
            )
        self.calls.append(call)
        parts = [part[self.index] for part in self.world.meet(self.index, call, torch.split(x, list(send)))]
        return torch.cat(parts)


class World:
    """As many ranks as one group has, for one run of `work` in each."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.ranks = [Rank(self, index) for index in range(size)]
        self._barrier = threading.Barrier(size)
        self._calls: list[Call | None] = [None] * size
        self._parts: list[Sequence[Tensor]] = [()] * size
        self._errors: list[BaseException | None] = [None] * size

    def run(self, work: Callable[[Rank], Answer]) -> list[Answer]:
        """What `work` answers in each rank. Raises the error of the first rank that failed by itself."""
        answers: dict[int, Answer] = {}

        def main(rank: Rank) -> None:
            torch.set_num_threads(1)  # a setting of each thread; `deterministic_threads` sets it for the others
            try:
                with simulated(rank):
                    answers[rank.index] = work(rank)
                self.meet(rank.index, None, ())
            except BaseException as error:
                self._errors[rank.index] = error
                self._barrier.abort()

        threads = [threading.Thread(target=main, args=(rank,), name=f"rank {rank.index}") for rank in self.ranks]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except BaseException:
            self._barrier.abort()  # an interrupted process does not leave ranks that wait for each other
            raise
        self._raise_first_error()
        return [answers[rank.index] for rank in self.ranks]

    def _raise_first_error(self) -> None:
        for index, error in enumerate(self._errors):
            if error is not None and not isinstance(error, threading.BrokenBarrierError):
                if not isinstance(error, CheckFailed):
                    error.add_note(f"in rank {index} of a simulated world of {self.size}")
                raise error

    def meet(self, index: int, call: Call | None, parts: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        """Waits for all ranks; returns what each of them brought. `call` is None where a rank's work has ended."""
        self._calls[index], self._parts[index] = call, parts
        self._barrier.wait()
        calls, brought = list(self._calls), list(self._parts)
        self._barrier.wait()  # nobody goes on, and writes again, before everybody has read
        problem = disagreement(calls)
        if problem is not None:
            raise CheckFailed(f"collectives differ between ranks: {problem}")
        return brought


def disagreement(calls: Sequence[Call | None]) -> str | None:
    """What does not agree among the calls that the ranks of a group are at, naming the nodes of two ranks, or None."""
    first = calls[0]
    for index, call in enumerate(calls):
        if (first is None) != (call is None) or (first and call and _identity(first) != _identity(call)):
            return f"rank 0 {_place(first)}, rank {index} {_place(call)}"
    for sender, sent in enumerate(calls):
        for receiver, received in enumerate(calls):
            if sent and received and sent.send[receiver] != received.receive[sender]:
                return (
                    f"rank {sender} sends {sent.send[receiver]} rows to rank {receiver} in {sent}, and rank {receiver} "
                    f"expects {received.receive[sender]} in {received}"
                )
    return None


def _identity(call: Call) -> tuple[object, ...]:
    return call.node, call.operator, call.group, call.dtype, call.width


def _place(call: Call | None) -> str:
    return "has ended" if call is None else f"is at {call}"


def rank_of_thread() -> Rank | None:
    """The simulated rank that this thread is, if it is one."""
    peers = peers_of_thread()
    return peers if isinstance(peers, Rank) else None
