"""Rows written into the buffers of other ranks, several ranks in one process: plan, put, signals, take, send back, sum.
Bitwise what plain indexing gives, through several exchanges without a reset."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moegraph.kernels.signals import ARRIVED, FREE, signal_launch, wait_launch
from moegraph.runtime import symmetric
from tests.kernels.fake_ranks import channels, check_trip, planned, round_trip, sizes

CPU = torch.device("cpu")
CASES: list[dict[str, Any]] = [
    {"tokens": 6, "width": 16, "k": 4, "experts": 6, "kind": "any", "dtype": torch.float32},
    {"tokens": 5, "width": 40, "k": 1, "experts": 6, "kind": "any", "dtype": torch.float16},
    {"tokens": 5, "width": 24, "k": 2, "experts": 12, "kind": "dropped", "dtype": torch.bfloat16},
    {"tokens": 4, "width": 7, "k": 2, "experts": 6, "kind": "one", "dtype": torch.float32},
    {"tokens": 4, "width": 8, "k": 2, "experts": 6, "kind": "silent", "dtype": torch.float32},
]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['kind']}-k{case['k']}-d{case['width']}")
def test_a_round_trip_is_bitwise_plain_indexing(case: dict[str, Any], ranks: int) -> None:
    room = ranks * case["tokens"] * case["k"]
    parts = planned(ranks, room, CPU, **case)
    out, home = (channels(ranks, size, CPU) for size in sizes(parts, room))
    check_trip(round_trip(out, home, parts, room), parts, room)
    check_trip(round_trip(out, home, parts, room, values=False), parts, room, values=False)
    assert all(int(channel.epoch) == 2 for channel in out + home)


@pytest.mark.parametrize("room", [1, 5, 9])
def test_rows_past_a_full_buffer_are_never_written(room: int) -> None:
    parts = planned(2, room, CPU, **CASES[3])
    assert sum(int(part.lost) for part in parts) == 16 - room
    out, home = (channels(2, size + 64, CPU) for size in sizes(parts, room))
    check_trip(round_trip(out, home, parts, room), parts, room)
    for channel, size in zip(out, [sizes(parts, room)[0]] * 2, strict=True):
        assert bool((channel.buffer[size:] == 0xAB).all())


def test_rows_wider_than_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moegraph.kernels.direct_rows._WIDTH", 16)
    parts = planned(2, 24, CPU, **{**CASES[0], "width": 40})
    out, home = (channels(2, size, CPU) for size in sizes(parts, 24))
    check_trip(round_trip(out, home, parts, 24), parts, 24)


def test_buffers_serve_other_shapes_and_nothing_of_an_earlier_exchange_is_seen() -> None:
    """Poisoned when released, then used for fewer, narrower rows and again for the first ones."""
    large = planned(2, 48, CPU, **CASES[0])
    small = planned(2, 7, CPU, **CASES[4])
    out, home = (channels(2, size, CPU) for size in sizes(large, 48))
    symmetric.poison(True)
    try:
        for parts, room in ((large, 48), (small, 7), (large, 48)):
            check_trip(round_trip(out, home, parts, room), parts, room)
            assert all(bool(channel.buffer.view(torch.float32).isnan().all()) for channel in out + home)
    finally:
        symmetric.poison(False)


def test_no_tokens_at_all() -> None:
    parts = planned(2, 4, CPU, **{**CASES[0], "tokens": 0})
    out, home = (channels(2, size + 16, CPU) for size in sizes(parts, 4))
    rows = round_trip(out, home, parts, 4).arrived[0][0]
    assert rows.shape == (4, 16)
    assert not rows.any()


@pytest.mark.slow
def test_more_ranks_and_experts_than_a_warp_has_lanes() -> None:
    case = {**CASES[0], "tokens": 2, "experts": 160, "k": 3}
    parts = planned(40, 10, CPU, **case)
    out, home = (channels(40, size, CPU) for size in sizes(parts, 10))
    check_trip(round_trip(out, home, parts, 10), parts, 10)


def test_numbers_of_exchanges_may_run_over() -> None:
    (channel,) = channels(1, 16, CPU)
    channel.epoch.fill_(2**31 - 1)
    channel.flags.fill_(2**31 - 1)
    for _ in range(2):
        wait_launch(channel.flags, channel.epoch, FREE).run()
        signal_launch(channel.flag_table, channel.epoch, ARRIVED, 0).run()
        wait_launch(channel.flags, channel.epoch, ARRIVED).run()
        signal_launch(channel.flag_table, channel.epoch, FREE, 0).run()
    assert channel.epoch.tolist() == [-(2**31) + 1]
    assert channel.flags.tolist() == [[-(2**31) + 1]] * 2
