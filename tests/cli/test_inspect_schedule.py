"""`moegraph inspect --schedule` shows stages, ranks and what happens when, for every schedule and without ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from moegraph.cli.inspect_schedule import MOST_SLOTS, timeline_lines
from moegraph.graph.schedule import Action, Timed, Timeline, simulate
from tests.everyday import everyday

from .conftest import SMALL, Moegraph

ONE_EACH = ["gpipe", "1f1b"]
TWO_EACH = ["interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble", "dual_pipe_v"]


@pytest.fixture
def four_layers(here: Path, cached_compile: None) -> Path:
    """The small spec with four layers as ./moegraph.yaml, on two pipeline ranks."""
    text = SMALL.replace("num_layers: 2", "num_layers: 4").replace(
        "train:\n", "layout: {pp: 2, microbatches: 4}\ntrain:\n"
    )
    path = here / "moegraph.yaml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("name", everyday(ONE_EACH + TWO_EACH))
def test_every_schedule_is_shown(moegraph: Moegraph, four_layers: Path, name: str) -> None:
    done = moegraph("inspect", "--schedule", "--set", f"layout.schedule={name}")
    assert done.status == 0
    lines = done.out.splitlines()
    stages = 4 if name in TWO_EACH else 2
    assert lines[0] == f"schedule {name}: pp 2, {stages} stages, 4 micro-batches"
    assert lines[2].split() == ["stage", "rank", "blocks", "forward", "share", "parameters"]
    timeline = [line.split() for line in lines if line.startswith("rank ") and "busy" not in line]
    assert [line[1] for line in timeline] == ["0", "1"]
    assert timeline[0][2] == ("0F0" if name in TWO_EACH else "F0")
    assert timeline[1][2] == "."
    assert sum(line.startswith("bubble of all ranks: ") for line in lines) == 1


def test_the_table_says_what_each_stage_has(moegraph: Moegraph, four_layers: Path) -> None:
    out = moegraph("inspect", "--schedule", "--set", 'layout.stages="embedding,0|1-3,head"').out
    rows = [
        [cell.strip() for cell in line.split("  ") if cell.strip()] for line in out.splitlines() if "layers." in line
    ]
    assert [row[:3] for row in rows] == [
        ["0", "0", "embedding, layers.0"],
        ["1", "1", "layers.1 … layers.3, head"],
    ]
    # embedding; attention (q, o: 16×16, k, v: 8×16, two norms of heads), SwiGLU of 16, two norms
    assert rows[0][-1] == f"{(300 * 16 + 2 * 256 + 2 * 128 + 2 * 8 + 3 * 256 + 2 * 16) / 1e3:.4g} k"
    assert sum(float(row[-2].rstrip("%")) for row in rows) == pytest.approx(100, abs=0.11)


def test_the_v_of_the_stages_is_shown(moegraph: Moegraph, four_layers: Path) -> None:
    found = moegraph("inspect", "--schedule", "--json", "--set", "layout.schedule=zbv_zero_bubble").json
    assert [stage["rank"] for stage in found["stages"]] == [0, 1, 1, 0]
    assert [rank["stages"] for rank in found["ranks"]] == [[0, 3], [1, 2]]
    assert [block for stage in found["stages"] for block in stage["blocks"]] == [
        "embedding", "layers.0", "layers.1", "layers.2", "layers.3", "head",
    ]  # fmt: skip
    assert sum(stage["share"] for stage in found["stages"]) == pytest.approx(1)
    assert {action["kind"] for action in found["ranks"][0]["actions"]} == {"F", "I", "W"}


def test_json_has_every_action_with_its_time_and_the_bubbles_fit(moegraph: Moegraph, four_layers: Path) -> None:
    found = moegraph("inspect", "--schedule", "--json").json
    assert (found["schedule"], found["pp"], found["microbatches"]) == ("1f1b", 2, 4)
    ends = []
    for rank in found["ranks"]:
        actions = rank["actions"]
        assert [f"{a['kind']}{a['microbatch']}" for a in actions].count("F0") == 1
        assert len(actions) == 8
        busy = sum(action["end"] - action["start"] for action in actions)
        assert rank["bubble"] == pytest.approx(1 - busy / found["end"])
        ends.append(actions[-1]["end"])
    assert found["end"] == max(ends)
    assert found["bubble"] == pytest.approx(sum(rank["bubble"] for rank in found["ranks"]) / 2)
    first = found["ranks"][0]["actions"][0]
    assert first["end"] == pytest.approx(2 * found["stages"][0]["share"])


def test_one_rank_has_no_bubble(moegraph: Moegraph, four_layers: Path) -> None:
    found = moegraph("inspect", "--schedule", "--json", "--set", "layout.pp=1").json
    assert found["bubble"] == 0
    assert "".join(a["kind"] for a in found["ranks"][0]["actions"]) == "FBFBFBFB"


def test_what_a_pass_placed_is_shown(moegraph: Moegraph, four_layers: Path) -> None:
    out = moegraph("inspect", "--diff", "split-pipeline", "--set", 'layout.stages="embedding,0-2|3,head"').out
    assert out.startswith(
        "split-pipeline: layer pass, exact, 2 blocks moved to another stage\n"
        "stage 0: embedding, layers.0 … layers.2\n"
        "stage 1: layers.3, head\n"
    )


@pytest.mark.parametrize("option", ["--stat", "--kernels", "--expand", "--full"])
def test_other_views_do_not_go_with_it(moegraph: Moegraph, four_layers: Path, option: str) -> None:
    done = moegraph("inspect", "--schedule", option)
    assert done.status == 2
    assert f"{option} does not go with --schedule" in done.err


def test_a_timeline_is_drawn_to_scale() -> None:
    orders = [[Action(0, "F", 0), Action(0, "B", 0)], [Action(1, "F", 0), Action(1, "I", 0), Action(1, "W", 0)]]
    assert timeline_lines(simulate(orders, [1, 2]), with_stages=False) == [
        "rank 0  F0 .  .  .  .  B0 -",
        "rank 1  .  F0 -  I0 -  W0 -",
    ]
    assert timeline_lines(simulate(orders, [2, 2]), with_stages=True) == [
        "rank 0  0F0 .   .   0B0 -",
        "rank 1  .   1F0 1I0 1W0 .",
    ]


def test_a_timeline_too_long_to_draw_says_so() -> None:
    timeline = Timeline(((Timed(Action(0, "F", 0), 0, 1), Timed(Action(0, "F", 1), 1, 10 * MOST_SLOTS)),))
    line, sentence = timeline_lines(timeline, with_stages=False)
    assert len(line.split()) == 2 + MOST_SLOTS
    assert sentence == f"drawn in {MOST_SLOTS} slots; actions shorter than one may not show"


def test_a_stage_without_operations_is_drawn() -> None:
    orders = [[Action(0, "F", 0), Action(0, "B", 0)], [Action(1, "F", 0), Action(1, "B", 0)]]
    assert timeline_lines(simulate(orders, [0, 1]), with_stages=False) == [
        "rank 0  .  .  .",
        "rank 1  F0 B0 -",
    ]
