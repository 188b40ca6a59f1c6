"""Differences of graph texts: readable, complete, and counted."""

from __future__ import annotations

from moegraph.graph.diff import count_operators, diff_json, diff_lines, diff_programs, operator_of, operators_text

BEFORE = """\
hidden: f32[4, 8] = input  # lower
moe.weight: f32[8, 8] = parameter  # lower
moe.route: (f32[4, 2], i32[4, 2]) = route(hidden, None, score='softmax = sigmoid', top_k=2)  # lower
moe.ids: i32[4, 2] = moe.route[1]  # lower
return hidden hidden = hidden, metric ids = moe.ids"""
AFTER = (
    BEFORE.replace("return", "moe.z: f32[] = moegraph.z_loss.default(moe.weight)  # mine\nreturn")
    + ", auxiliary z = moe.z"
)
TITLES = {"moe": "layers.1 … layers.3", "head": "head"}
NAMES = ("one", "two")


def lines(before: dict[str, str], after: dict[str, str], *, full: bool = False) -> list[str]:
    diffs = diff_programs({"moe": before, "head": {"layer": BEFORE}}, {"moe": after, "head": {"layer": BEFORE}}, NAMES)
    return list(diff_lines(diffs, TITLES, full=full))


def test_operators_are_read_from_lines() -> None:
    found = [operator_of(line) for line in AFTER.splitlines()]
    assert found == ["input", "parameter", "route", "getitem", "moegraph.z_loss.default", "result"]
    assert count_operators(BEFORE) == {"input": 1, "parameter": 1, "route": 1, "getitem": 1}


def test_a_change_is_a_unified_diff_with_results_taken_apart() -> None:
    assert lines({"layer": BEFORE}, {"layer": AFTER}) == [
        "moe — layers.1 … layers.3",
        "--- moe/layer after one",
        "+++ moe/layer after two",
        "@@ -2,5 +2,7 @@",
        " moe.weight: f32[8, 8] = parameter  # lower",
        " moe.route: (f32[4, 2], i32[4, 2]) = route(hidden, None, score='softmax = sigmoid', top_k=2)  # lower",
        " moe.ids: i32[4, 2] = moe.route[1]  # lower",
        "+moe.z: f32[] = moegraph.z_loss.default(moe.weight)  # mine",
        " return hidden hidden = hidden",
        " return metric ids = moe.ids",
        "+return auxiliary z = moe.z",
        "",
        "moe: +1 moegraph.z_loss.default, +1 result",
        "unchanged: head",
    ]
    assert lines({"layer": AFTER}, {"layer": BEFORE})[-2] == "moe: -1 moegraph.z_loss.default, -1 result"


def test_nothing_changed_is_one_line() -> None:
    assert lines({"layer": BEFORE}, {"layer": BEFORE}) == ["unchanged: moe, head"]


def test_a_change_that_no_count_shows_is_not_called_nothing() -> None:
    changed = BEFORE.replace("top_k=2", "top_k=1")
    assert lines({"layer": BEFORE}, {"layer": changed})[-2] == "moe: the same operators, otherwise connected or named"


def test_other_graphs_are_told_in_sizes_unless_all_is_wanted() -> None:
    short = lines({"layer": BEFORE}, {"forward": AFTER, "backward": ""})
    assert short[1:4] == [
        "  nodes: layer 4 → forward 5, backward 0",
        "  forward: 1 getitem, 1 input, 1 moegraph.z_loss.default, 1 parameter, 1 route",
        "  backward: nothing",
    ]
    full = lines({"layer": BEFORE}, {"forward": AFTER, "backward": ""}, full=True)
    assert sum(line.startswith("+") and not line.startswith("+++") for line in full) == 8


def test_a_diff_can_be_limited_to_kinds() -> None:
    texts = {"moe": {"layer": BEFORE}, "head": {"layer": BEFORE}}
    assert [each.kind for each in diff_programs(texts, texts, NAMES, ["head"])] == ["head"]


def test_the_difference_as_json_lists_only_graphs_that_changed() -> None:
    diffs = diff_programs({"moe": {"a": BEFORE, "b": BEFORE}}, {"moe": {"a": BEFORE, "b": AFTER}}, NAMES)
    (kind,) = diff_json(diffs, TITLES)
    assert (kind["changed"], kind["restructured"], list(kind["graphs"])) == (True, False, ["b"])
    assert list(diff_lines(diffs, TITLES))[-1] == "moe: b +1 moegraph.z_loss.default, +1 result"


def test_many_operators_are_cut_short() -> None:
    assert operators_text({"a": 1, "b": 3, "c": 1}, most=2) == "3 b, 1 a, … 1 more operators"
