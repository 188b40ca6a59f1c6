"""`moegraph inspect` shows graphs, differences, values and runs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import Moegraph

TINY = "specs/presets/tiny.yaml"
ROOT = Path(__file__).parents[2]


@pytest.fixture
def inspect(moegraph: Moegraph, compiled_once: Path, cached_compile: None, monkeypatch: pytest.MonkeyPatch) -> Moegraph:
    """`inspect("--stat")`: inspect of the small spec."""
    monkeypatch.chdir(compiled_once)
    return lambda *arguments: moegraph("inspect", *arguments)


def test_the_difference_that_balance_losses_make_reads_well(
    moegraph: Moegraph, golden: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    done = moegraph("inspect", TINY, "--diff", "balance-losses")
    assert done.status == 0, done.err
    golden("tiny-balance-losses.diff", done.out)


def test_precision_says_what_would_travel_in_8_bits_how_many_bytes_that_is_and_why(inspect: Moegraph) -> None:
    assert "no row travels: layout.ep is 1" in inspect("--precision").out
    values = ("layout={dp: 2, ep: 2}", "model.d_model=32", "precision={compute: bf16, mxfp8: {dispatch: 'on'}}")
    low = [word for value in values for word in ("--set", value)]
    rows, gradients = inspect(*low, "--precision", "--json").json["dispatch"]["trips"]
    assert (rows["what"], gradients["what"]) == ("rows", "gradients")
    for trip in (rows, gradients):
        assert trip["low"]
        assert trip["reason"] == "the spec asks for it"
        assert trip["low_bytes"] * 64 == trip["bf16_bytes"] * 33
    assert re.search(r"moe.return/grad.exact_exchange +gradients +mxfp8", inspect(*low, "--precision").out)
    difference = inspect(*low, "--diff", "cast-dispatch", "--kind", "moe").out
    assert "+2 moegraph.mx_encode" in difference


def test_by_default_the_graphs_after_the_last_layer_pass_are_printed(inspect: Moegraph) -> None:
    done = inspect()
    headers = [line for line in done.out.splitlines() if line.startswith("#")]
    expected = [
        "embedding / layer — embedding",
        "dense / layer — layers.0",
        "moe / layer — layers.1",
        "head / layer — head",
    ]
    assert headers == [f"# {each}" for each in expected]
    nodes = [line for line in done.out.splitlines() if line and not line.startswith(("#", "return "))]
    assert all(re.fullmatch(r"[\w./]+: .+ = .+  # (lower|canonicalize|balance-losses)", line) for line in nodes)
    assert any(line.endswith("# balance-losses") for line in nodes)


def test_after_and_graph_choose_the_graphs(inspect: Moegraph) -> None:
    assert "balance" not in inspect("--after", "lower").out
    step = inspect("--after", "split-backward", "--graph", "backward_weight", "--kind", "moe").out
    assert step.startswith("# moe / backward_weight — layers.1\n")
    assert "grouped_mm_wgrad" in step
    assert inspect("--graph", "backward_weight", "--kind", "moe").out == step
    assert "# head / joint" in inspect("--graph", "joint").out


def test_expand_writes_full_names_and_grep_keeps_matching_lines(inspect: Moegraph) -> None:
    done = inspect("--expand", "--grep", r"= grouped_mm")
    assert done.out.splitlines()[0] == "# layers.1 / layer — moe"
    assert [line.split(":")[0] for line in done.out.splitlines()[1:]] == ["layers.1.moe.up", "layers.1.moe.down"]
    assert "grouped_mm(layers.1.moe.rows, layers.1.moe.w_up, layers.1.moe.offsets)" in done.out
    done = inspect("--grep", "no such text")
    assert (done.status, done.out) == (0, "")
    assert "no line" in done.err


def test_a_tied_head_shows_whose_weight_it_reads(inspect: Moegraph) -> None:
    done = inspect("--expand", "--kind", "head", "--grep", "parameter", "--set", "model.tie_embeddings=true")
    assert "\nembedding.weight: " in done.out


def test_json_holds_the_same_lines(inspect: Moegraph) -> None:
    text = inspect("--kind", "moe").out
    (graph,) = inspect("--kind", "moe", "--json").json["graphs"]
    assert [node["text"] for node in graph["nodes"]] == text.splitlines()[1:]
    assert graph["outputs"][-1] == ["auxiliary", "z"]


def test_stat_counts_nodes_and_operators(inspect: Moegraph) -> None:
    graphs = inspect("--stat", "--json").json["graphs"]
    assert [graph["kind"] for graph in graphs] == ["embedding", "dense", "moe", "head"]
    assert graphs[2]["operators"]["grouped_mm"] == 2
    assert sum(graphs[2]["operators"].values()) == graphs[2]["nodes"]
    assert "2 grouped_mm" in inspect("--stat").out


def test_passes_that_make_new_graphs_are_told_in_sizes(inspect: Moegraph) -> None:
    for name, graphs in (("trace", "layer 59 → joint"), ("split-backward", "→ forward")):
        short, full = inspect("--diff", name).out, inspect("--diff", name, "--full").out
        assert graphs in short
        assert len(short.splitlines()) < 50 < len(full.splitlines())


def test_a_difference_as_json_names_what_came(inspect: Moegraph) -> None:
    data = inspect("--diff", "balance-losses", "--json").json
    changed = [kind for kind in data["kinds"] if kind["changed"]]
    assert data["rewritten"]["moe"] == ["moe.balance_loss", "moe.z_loss"]
    assert [kind["kind"] for kind in changed] == ["moe"]
    assert changed[0]["graphs"]["layer"]["added"] == {"balance_sequence": 1, "z_loss": 1, "result": 2}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--after nothing", "no pass 'nothing' ran; these did: lower"),
        ("--diff nothing", "no pass 'nothing' ran"),
        ("--diff lower", "nothing to compare"),
        ("--kind nothing", "there are embedding, dense, moe, head"),
        ("--graph nothing", "there are layer, joint, forward"),
        ("--graph joint --after lower", "there are layer"),
        ("--graph joint --diff canonicalize", "there are layer"),
        ("--stage 1", "there is no stage 1: there is only stage 0"),
        ("--stage -1", "there is no stage -1"),
        ("--grep (", "not a regular expression"),
        ("--full", "--full goes with --diff"),
        ("--router", "--router goes with the folder of a run"),
        ("--diff trace --after lower", "--after does not go with --diff"),
        ("--diff trace --grep x", "--grep does not go with --diff"),
        ("--resolved --kind moe", "--kind does not go with --resolved"),
    ],
)
def test_what_cannot_be_shown_is_refused(inspect: Moegraph, line: str, says: str) -> None:
    done = inspect(*line.split())
    assert (done.status, done.out) == (2, "")
    assert says in done.err


def test_a_stage_shows_its_own_blocks(inspect: Moegraph) -> None:
    options = ("--set", "layout={pp: 2, microbatches: 2}", "--stage", "1")
    lines = inspect(*options, "--grep", "^return").out.splitlines()
    assert [line for line in lines if line.startswith("#")] == ["# moe / layer — layers.1", "# head / layer — head"]
    rows = inspect(*options, "--stat", "--json").json["graphs"]
    assert [(row["kind"], row["instances"]) for row in rows] == [("moe", "layers.1"), ("head", "head")]
    shown = inspect(*options, "--expand", "--json").json["graphs"]
    assert [graph["block"] for graph in shown] == ["layers.1", "head"]
    assert "moe — layers.1\n" in inspect(*options, "--diff", "balance-losses").out
    assert "stage 1 has no block of kind 'dense': there are moe, head" in inspect(*options, "--kind", "dense").err


def test_resolved_prints_every_value_with_its_origin(inspect: Moegraph) -> None:
    done = inspect("--resolved", "--set", "train.steps=7")
    lines = dict(re.fullmatch(r"([\w.\[\]-]+): .*?  # (.+)", line).groups() for line in done.out.splitlines())
    assert lines["train.steps"] == "--set train.steps=7"
    assert lines["model.num_layers"] == "moegraph.yaml:5:15"
    assert lines["model.moe.top_k"].startswith("presets/tiny.yaml:")
    assert lines["layout.dp"] == "default"
    assert inspect("--resolved", "--json").json["values"]["model.d_model"] == {
        "value": 16,
        "origin": "moegraph.yaml:6:12",
    }


def test_a_compiled_directory_stands_for_its_spec(inspect: Moegraph) -> None:
    assert inspect("compiled/moegraph").out == inspect().out


def test_a_users_pass_is_shown_like_any_other(moegraph: Moegraph, small: Path, user_pass: Path) -> None:
    done = moegraph("inspect", "--pass-file", user_pass, "--diff", "mark-layers")
    assert done.status == 0, done.err
    assert "+1 scale" in done.out


def test_a_run_shows_its_last_record(moegraph: Moegraph, tmp_path: Path) -> None:
    records = [
        {"step": 0, "validation_loss": 3.0},
        {"step": 1, "loss": 2.5},
        {"step": 2, "loss": 2.0, "grad_norm": 1.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records), encoding="utf-8")
    done = moegraph("inspect", tmp_path)
    assert "loss 2.0000" in done.out
    assert "2.5000 at step 1 → 2.0000 at step 2" in done.out
    assert moegraph("inspect", tmp_path, "--json").json["last"] == records[-1]
    assert "no routing" in moegraph("inspect", tmp_path, "--router").err
    assert "--diff does not go with a run" in moegraph("inspect", tmp_path, "--diff", "trace").err
