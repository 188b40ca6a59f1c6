"""How much of one set of time spans another one hides."""

from __future__ import annotations

from moegraph.benchmarks.device_profile import total, uncovered


def test_overlapping_spans_count_once() -> None:
    assert total([]) == 0
    assert total([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (3.0, 4.0)]) == 5


def test_exposed_is_what_no_other_span_covers() -> None:
    talking = [(0.0, 4.0), (6.0, 8.0), (7.0, 9.0)]
    assert uncovered(talking, []) == 7
    assert uncovered(talking, [(1.0, 2.0), (3.0, 7.0)]) == 4
    assert uncovered(talking, [(-1.0, 10.0)]) == 0
