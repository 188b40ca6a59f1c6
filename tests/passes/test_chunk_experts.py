"""chunk-experts: what is cut, that runs take turns between exchanges, and that numbers stay."""

from __future__ import annotations

import pytest

from moegraph import ops
from moegraph.graph.names import display_name
from moegraph.graph.program import Unit, ports
from moegraph.passes.chunk_experts import chunk_of
from moegraph.verify.passes import verify_spec
from tests.small_models import compile_once, small_spec

PADDED = "layout={dp: 2, ep: 2, transport: padded, capacity: 2}"
CHUNKED = (PADDED, "passes.overlap-communication={mode: on, chunks: 2}")


def order_of(unit: Unit, graph: str, *wanted: str) -> list[str]:
    """Names of the calls in which one of the words occurs, in order."""
    names = [display_name(node) for node in unit.graphs[graph].graph.nodes if node.op == "call_function"]
    return [name.split("/")[0] for name in names if any(word in name for word in wanted)]


def test_each_run_has_a_dispatch_of_its_own_and_all_have_the_same_weights() -> None:
    unit = compile_once(small_spec(*CHUNKED)).program.units["moe"]
    layer = unit.layer_graph.graph
    assert len(layer.find_nodes(op="call_function", target=ops.sort_by_expert)) == 4  # two at home, two at the experts
    products = layer.find_nodes(op="call_function", target=ops.grouped_mm)
    assert [display_name(node) for node in products] == [f"moe.chunk{c}.{n}" for c in (0, 1) for n in ("up", "down")]
    assert products[0].args[1] is products[2].args[1]
    metrics = [port.name for port in ports(unit.layer_graph, "outputs") if port.role == "metric"]
    assert metrics.count("overflow") == 1


@pytest.mark.parametrize("fused", [False, True])
def test_one_run_travels_while_the_experts_work_on_the_other(fused: bool) -> None:
    extra = ("passes.fuse-experts.enabled=true",) if fused else ()
    unit = compile_once(small_spec(*CHUNKED, *extra)).program.units["moe"]
    words = ("dispatch_start/", "dispatch/wait", "return_start/", "return/wait", "experts/expert_ffn", "up/grouped")
    work = "experts" if fused else "up"
    assert order_of(unit, "forward", *words) == [
        "moe.chunk0.dispatch_start",
        "moe.chunk1.dispatch_start",
        "moe.chunk0.dispatch",
        f"moe.chunk0.{work}",
        "moe.chunk0.return_start",
        "moe.chunk1.dispatch",
        f"moe.chunk1.{work}",
        "moe.chunk1.return_start",
        "moe.chunk0.return",
        "moe.chunk1.return",
    ]
    words = ("return/grad.all", "return_start/grad.wait", "dispatch/grad.all", "dispatch_start/grad.wait", "_wgrad")
    backward = order_of(unit, "backward", *words)
    weights = [name for name in backward if name.endswith((".up", ".down", ".experts"))]
    assert len(weights) == 4  # between the last start and the first wait, where nothing else is left to do
    assert backward[:6] == [
        "moe.chunk1.return",
        "moe.chunk0.return",
        "moe.chunk1.return_start",
        "moe.chunk1.dispatch",
        "moe.chunk0.return_start",
        "moe.chunk0.dispatch",
    ]
    assert backward[6:10] == weights


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(("precision.compute=fp64", "model.moe.expert_bias=true"), marks=pytest.mark.slow),
        pytest.param(("precision.compute=fp64", "layout.overflow=drop"), marks=pytest.mark.slow),
        ("precision.compute=fp32", "passes.fuse-experts.enabled=true", "passes.recompute.policy=full"),
        pytest.param(  # 9 tokens: runs of 5 and 4
            ("precision.compute=fp64", "data.seq_len=9", "train.tokens_per_step=18"), marks=pytest.mark.slow
        ),
    ],
)
def test_two_ranks_agree_with_the_block_that_is_whole(overrides: tuple[str, ...]) -> None:
    short = ("model.num_layers=1", "model.dense=null", "data.seq_len=8", "train.tokens_per_step=32")
    report = verify_spec(small_spec(*short, *CHUNKED, *overrides))
    assert report.ok
    (row,) = [row for row in report.rows if row.name == "chunk-experts"]
    assert row.rewritten
    assert row.planted_found
    assert row.gradient_difference < (1e-4 if "precision.compute=fp32" in overrides else 1e-10)


def test_the_number_of_a_run_is_read_from_a_name() -> None:
    assert [chunk_of(name) for name in ("moe.chunk1.rows", "moe.chunk0.up/grad.mm", "moe.chunked", "moe", "")] == [
        1,
        0,
        None,
        None,
        None,
    ]


def test_without_experts_or_with_one_rank_nothing_is_cut() -> None:
    record = compile_once(small_spec(*CHUNKED)).record("chunk-experts")
    assert not record.rewritten["dense"]
    assert record.notes["dense"] == "no experts in this block"
