"""The routing drawn in the terminal."""

from __future__ import annotations

from typing import Any

import pytest

from moegraph.errors import UsageError
from moegraph.runtime.router_metrics import layer_routing
from moegraph.runtime.router_view import router_json, router_text


def _record(step: int, **layers: list[int]) -> dict[str, Any]:
    router = {name: layer_routing(counts, [1.0] * len(counts), 0.9).to_json() for name, counts in layers.items()}
    return {"step": step, "loss": 1.0, "router": router}


def test_each_expert_is_a_character_of_its_load() -> None:
    text = router_text([_record(7, layer_1=[4, 4, 4, 4], layer_2=[0, 2, 4, 10])])
    assert text.splitlines() == [
        "load per expert, step 7: mean ▄, twice the mean or more █, no token ·",
        "                   max/mean  min/mean  dead  entropy",
        "layer_1  ▄▄▄▄          1.00      1.00     0    0.900",
        "layer_2  ·▂▄█          2.50      0.00     1    0.900",
    ]


def test_an_expert_with_a_single_token_is_not_drawn_as_dead() -> None:
    assert "█▁·" in router_text([_record(1, a=[1000, 1, 0])])


def test_ascii_alone_can_draw_it() -> None:
    text = router_text([_record(1, a=[0, 2, 4, 10]), _record(2, a=[0, 2, 4, 10])], unicode=False)
    assert text.isascii()
    assert text.splitlines()[2].startswith("a  _:=@  ")


def test_more_experts_than_fit_are_drawn_together_by_their_busiest() -> None:
    counts = [10] * 256
    counts[17], counts[18] = 200, 0
    text = router_text([_record(1, a=counts)], width=100)
    head, _, line = text.splitlines()
    assert "a character is the busiest of 5 experts" in head
    assert line.count("█") == 1
    assert "·" not in line
    assert 90 <= len(line) <= 100


def test_the_last_record_with_routing_is_drawn_and_the_curve_shows_all() -> None:
    records = [_record(step, a=[16 - step, step]) for step in range(1, 9)]
    text = router_text([{"step": 0, "validation_loss": 1.0}, *records, {"step": 9, "loss": 1.0}])
    assert "step 8" in text
    assert text.endswith("1.88 █▇▆▅▃▂▁▁ 1.00")


def test_a_record_with_a_number_that_is_not_finite_is_still_drawn() -> None:
    record = _record(1, a=[1, 2])
    record["router"]["a"]["entropy"] = None
    assert router_text([record]).endswith("not finite")


def test_json_has_the_loads_and_the_history() -> None:
    view = router_json([_record(1, a=[3, 1]), _record(2, a=[2, 2])])
    assert view["step"] == 2
    assert view["layers"]["a"]["load"] == [1.0, 1.0]
    assert view["layers"]["a"]["load_max_over_time"] == [1.5, 1.0]
    assert view["layers"]["a"]["counts"] == [2, 2]


def test_a_run_without_experts_says_so() -> None:
    for records in ([], [{"step": 1, "loss": 2.0}], [{"step": 1, "router": {}}]):
        with pytest.raises(UsageError, match="no routing to show"):
            router_text(records)
