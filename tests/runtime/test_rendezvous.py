"""Ranks of one start find each other, whatever an earlier start has left in their store."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from moegraph.errors import RunError
from moegraph.runtime.rendezvous import agree_on_word

SOON = timedelta(seconds=20)


def start(store: dist.Store, order: list[int]) -> list[str]:
    """What each rank of a start got."""
    words: dict[int, str] = {}

    def run(rank: int) -> None:
        words[rank] = agree_on_word(store, rank, len(order), SOON)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in order]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [words[rank] for rank in sorted(words)]


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0]])
def test_every_start_has_a_word_of_its_own(order: list[int]) -> None:
    store = dist.HashStore()
    store.set_timeout(SOON)
    starts = [start(store, order) for _ in range(3)]
    assert all(len(set(words)) == 1 for words in starts)
    assert len({words[0] for words in starts}) == 3


def test_what_a_dead_rank_left_is_answered_and_not_waited_for() -> None:
    store = dist.HashStore()
    store.set_timeout(SOON)
    store.set("hello/1", "of the dead")
    assert len(set(start(store, [0, 1]))) == 1
    store.set("hello/1", "of the dead")
    assert len(set(start(store, [1, 0]))) == 1


def test_ranks_that_do_not_come_are_named() -> None:
    store = dist.HashStore()
    with pytest.raises(RunError, match=r"rank 1, 2 did not come within layout\.timeout, 0\.2 s"):
        agree_on_word(store, 0, 3, timedelta(seconds=0.2))
