"""Ranks of one host take turns at compiling one graph, and only at one."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from moegraph.runtime.compile_lock import one_rank_at_a_time


@pytest.fixture
def several_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")


def second_gets_in(label: str, seconds: float) -> bool:
    """Whether another rank may compile `label` while "moe/forward" is being compiled."""
    inside = threading.Event()

    def other() -> None:
        with one_rank_at_a_time(label):
            inside.set()

    thread = threading.Thread(target=other)
    with one_rank_at_a_time("moe/forward"):
        thread.start()
        entered = inside.wait(seconds)
    thread.join(10)
    assert inside.is_set()
    return entered


@pytest.mark.usefixtures("several_ranks")
def test_one_graph_is_compiled_by_one_rank_at_a_time_and_others_meanwhile() -> None:
    assert not second_gets_in("moe/forward", 0.3)
    assert second_gets_in("moe/backward", 5.0)


def test_alone_on_the_host_nothing_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert second_gets_in("moe/forward", 5.0)
    assert not list(tmp_path.iterdir())
