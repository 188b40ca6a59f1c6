"""Channels of transport `direct`: one per group and direction, made again only when a larger buffer is needed."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from moegraph.errors import RunError
from moegraph.runtime import symmetric

CPU = torch.device("cpu")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Sizes of the memory that was asked for; a group of two ranks, this one twice."""
    sizes: list[int] = []

    def memory(size: int, group: Any, device: torch.device) -> tuple[Tensor, list[int], Any]:
        sizes.append(size)
        found = torch.full((size,), 255, dtype=torch.uint8)
        return found, [found.data_ptr()] * 2, object()

    group = SimpleNamespace(rank=lambda: 1, size=lambda: 2)
    monkeypatch.setattr(symmetric, "symmetric_memory", memory)
    monkeypatch.setattr(symmetric, "resolve_process_group", lambda name: group)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(symmetric.dist, "barrier", lambda group: None)
    yield sizes
    symmetric.forget_channels()


def test_a_channel_is_shared_by_all_exchanges_that_fit_into_its_buffer(made: list[int]) -> None:
    first = symmetric.channel_of("ep", "out", CPU, 1000)
    assert symmetric.channel_of("ep", "out", CPU, 500) is first
    assert made == [1008, 16]
    assert first.rank == 1
    assert first.epoch.tolist() == [0]
    assert first.flags.tolist() == [[0, 0], [0, 0]]
    assert first.table.tolist() == [first.buffer.data_ptr()] * 2
    assert first.flag_table.tolist() == [first.flags.data_ptr()] * 2


def test_directions_and_groups_have_channels_of_their_own(made: list[int]) -> None:
    keys = [("ep", "out"), ("ep", "home"), ("other", "out")]
    channels = [symmetric.channel_of(*key, CPU, 16) for key in keys]
    assert len({id(each) for each in channels}) == 3


def test_a_larger_buffer_replaces_the_smaller_one(made: list[int]) -> None:
    first = symmetric.channel_of("ep", "out", CPU, 32)
    first.epoch.fill_(7)
    second = symmetric.channel_of("ep", "out", CPU, 64)
    assert second is not first
    assert second.epoch.tolist() == [0]  # together with new flags
    assert symmetric.channel_of("ep", "out", CPU, 32) is second


def test_ranks_that_cannot_map_each_others_memory_are_told_what_to_do(
    made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(size: int, group: Any, device: torch.device) -> Any:
        raise RuntimeError("CUDASymmetricMemory: devices are not on one host\nat some file")

    monkeypatch.setattr(symmetric, "symmetric_memory", refuse)
    with pytest.raises(RunError, match=r"over NVLink.*not on one host\): use layout.transport=padded$"):
        symmetric.channel_of("ep", "out", CPU, 16)


def test_parts_of_a_buffer_are_aligned_and_do_not_overlap() -> None:
    layout = symmetric.Layout(5, 7, torch.bfloat16, torch.float32)
    assert (layout.values_at, layout.origins_at, layout.bytes) == (80, 112, 144)
    rows, values, origins = layout.views(torch.zeros(160, dtype=torch.uint8))
    assert rows.shape == (5, 7)
    assert values.shape == origins.shape == (5,)
    rows.fill_(1)
    values.fill_(2)
    origins.fill_(3)
    assert rows.sum() == 35
    assert values.sum() == 10
