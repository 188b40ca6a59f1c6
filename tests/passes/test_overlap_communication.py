"""overlap-communication: what it moves, what it leaves where it is, and that collectives keep their order."""

from __future__ import annotations

import pytest

from moegraph.graph.effects import is_communication
from moegraph.graph.names import display_name
from moegraph.graph.program import Unit
from tests.parallel.steps import layout_spec
from tests.small_models import compile_once

ON = "passes.overlap-communication.mode=on"
EP = {"dp": 2, "ep": 2, "transport": "padded"}


def names(unit: Unit, graph: str) -> list[str]:
    return [display_name(node) for node in unit.graphs[graph].graph.nodes if node.op == "call_function"]


def collectives(unit: Unit, graph: str) -> list[str]:
    return [display_name(node) for node in unit.graphs[graph].graph.nodes if is_communication(node)]


def test_shared_experts_run_while_rows_travel_in_both_directions() -> None:
    unit = compile_once(layout_spec(ON, **EP)).program.units["moe"]
    forward, backward = names(unit, "forward"), names(unit, "backward")
    start, wait = forward.index("moe.dispatch_start/all_to_all_single"), forward.index("moe.dispatch/wait_tensor")
    assert {name.split("/")[0] for name in forward[start + 1 : wait]} == {"shared.up", "shared.act", "shared.down"}
    start, wait = (
        backward.index("moe.return/grad.all_to_all_single"),
        backward.index("moe.return_start/grad.wait_tensor"),
    )
    assert "shared.down/grad.mm_add" in backward[start:wait]
    start, wait = (
        backward.index("moe.dispatch/grad.all_to_all_single"),
        backward.index("moe.dispatch_start/grad.wait_tensor"),
    )
    assert backward[start + 1 : wait] == ["moe.down/grad.grouped_mm_wgrad_add", "moe.up/grad.grouped_mm_wgrad_add"]


def test_collectives_keep_their_order_and_no_node_is_lost() -> None:
    moved = compile_once(layout_spec(ON, **EP)).program.units["moe"]
    plain = compile_once(layout_spec(**EP)).program.units["moe"]
    for graph in ("forward", "backward"):
        assert collectives(moved, graph) == collectives(plain, graph)
        assert sorted(names(moved, graph)) == sorted(names(plain, graph))
        assert names(moved, graph) != names(plain, graph)


def test_with_recomputation_the_shared_experts_still_move() -> None:
    unit = compile_once(layout_spec(ON, "passes.recompute.policy=full", **EP)).program.units["moe.recompute_full"]
    backward = names(unit, "backward")
    start, wait = (
        backward.index("moe.return/grad.all_to_all_single"),
        backward.index("moe.return_start/grad.wait_tensor"),
    )
    assert any(name.startswith("shared.") for name in backward[start:wait])


def test_a_block_without_shared_experts_still_delays_its_weight_gradients() -> None:
    record = compile_once(layout_spec(ON, "model.moe.shared=null", **EP)).record("overlap-communication")
    assert list(record.rewritten["moe"]) == ["moe.up/grad.grouped_mm_wgrad", "moe.down/grad.grouped_mm_wgrad"]
    assert "nothing is exchanged" in record.notes["dense"]


@pytest.mark.slow
@pytest.mark.parametrize("folded", [True, False])
def test_around_rows_that_travel_in_mxfp8_the_same_moves_with_what_decodes_them_for_weight_gradients(
    folded: bool,
) -> None:
    switch = f"passes.fold-decodes.enabled={str(folded).lower()}"
    low = ("precision={compute: bf16, mxfp8: {dispatch: 'on'}}", "model.d_model=32", switch)
    unit = compile_once(layout_spec(ON, *low, **EP)).program.units["moe"]
    forward, backward = names(unit, "forward"), names(unit, "backward")
    start, wait = forward.index("moe.dispatch_start/all_to_all_single"), forward.index("moe.dispatch/wait_tensor")
    assert {name.split("/")[0] for name in forward[start + 1 : wait]} == {"shared.up", "shared.act", "shared.down"}
    start, wait = (
        backward.index("moe.dispatch/grad.all_to_all_single"),
        backward.index("moe.dispatch_start/grad.wait_tensor"),
    )
    late = ["moe.down/grad.grouped_mm_wgrad_add", "moe.up/grad.mx_decode", "moe.up/grad.grouped_mm_wgrad_add"]
    late = [name for name in late if not (folded and "decode" in name)]
    assert backward[start + 1 : wait] == late


def test_the_opaque_exchange_has_no_place_for_other_work() -> None:
    record = compile_once(layout_spec(ON, dp=2, ep=2)).record("overlap-communication")
    assert record.count == 0
    assert "start and wait are one operator" in record.notes["moe"]
