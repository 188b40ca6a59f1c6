"""Where the ranks of a run meet: a store that nothing from an earlier start can be found in.

torchrun, when it starts ranks again (`--max-restarts`), may give them the store of the attempt before, in which the
addresses of dead processes still stand: gloo then connects to those, and fails. So all ranks of a start agree on a word
of their own first, and everything else is kept below that:

    rank r: hello/r = its token          rank 0: answer/r/<token> = the word, again until seen/r/<word> is there
    rank r: waits for answer/r/<its own token>, then seen/r/<word> = 1

A token of an earlier start is answered too, and nobody waits for that; a rank hears only a first rank that is alive.
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from moegraph.errors import RunError

_PAUSE = 0.01  # seconds between two looks at who is there


def meet(rank: int, world: int, timeout: timedelta) -> Store:
    """The store of this start, found through MASTER_ADDR and MASTER_PORT. Collective; raises RunError when not all
    ranks come in time."""
    store, _, _ = next(rendezvous("env://", rank, world, timeout=timeout))
    store.set_timeout(timeout)
    return PrefixStore(agree_on_word(store, rank, world, timeout), store)


def agree_on_word(store: Store, rank: int, world: int, timeout: timedelta) -> str:
    """The word of this start, the same on all its ranks and of no other."""
    mine = uuid.uuid4().hex
    if rank != 0:
        store.set(f"hello/{rank}", mine)
        try:
            word: str = store.get(f"answer/{rank}/{mine}").decode()
        except dist.DistError as error:
            seconds = f"{timeout.total_seconds():g} s"
            raise RunError(f"rank {rank}: rank 0 did not come within layout.timeout, {seconds}") from error
        store.set(f"seen/{rank}/{word}", "1")
        return word
    answered: set[tuple[int, str]] = set()
    missing = set(range(1, world))
    end = time.monotonic() + timeout.total_seconds()
    while missing:
        for other in sorted(missing):
            if store.check([f"seen/{other}/{mine}"]):
                missing.discard(other)
            elif store.check([f"hello/{other}"]):
                token = store.get(f"hello/{other}").decode()
                if (other, token) not in answered:
                    answered.add((other, token))
                    store.set(f"answer/{other}/{token}", mine)
        if missing and time.monotonic() > end:
            names = ", ".join(map(str, sorted(missing)))
            raise RunError(f"rank {names} did not come within layout.timeout, {timeout.total_seconds():g} s")
        time.sleep(_PAUSE if missing else 0)
    return mine
