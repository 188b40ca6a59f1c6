"""The verifier of operands in 8 bits finds scales of another tensor, of other rows and in another layout."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from moegraph.graph.edit import Rewriter
from moegraph.graph.names import display_name, facts
from moegraph.verify.operands import operands_with_their_scales
from moegraph.verify.structure import check_graph
from tests.small_models import compile_once, small_spec

_mg = torch.ops.moegraph
BF16 = ("precision.compute=bf16", "model.moe.d_ff=32", "model.num_layers=1", "model.dense=null")
SPEC = (*BF16, "precision.mxfp8.experts='on'")
FUSED = "passes.fuse-experts.enabled=true"


def rewriter() -> Rewriter:
    """The joint graph of a block with its experts in MXFP8, before anything is folded."""
    record = compile_once(small_spec(*SPEC, FUSED)).record("cast-mxfp8")
    return Rewriter(record.program.units["moe"].graphs["joint"], "mine")


def product(r: Rewriter) -> fx.Node:
    """The down projection, whose operands are the activation and a weight."""
    return next(node for node in r.find(_mg.mx_grouped_mm.default) if facts(node)["direction"] == "forward")


def scale_of_another(r: Rewriter) -> None:
    node, up = product(r), r.find(_mg.mx_up_swiglu.default)[0]
    node.update_arg(1, up.args[1])


def data_for_scale(r: Rewriter) -> None:
    node = product(r)
    node.update_arg(1, node.args[0])


def other_layout(r: Rewriter) -> None:
    node = product(r)
    node.update_arg(7, False)


def other_rows(r: Rewriter) -> None:
    node = product(r)
    mul = r.call_before(node, "doubled", torch.ops.aten.mul.Tensor, node.args[4], 2)
    facts(mul).update(layer=facts(node)["layer"], direction="forward")
    node.update_arg(4, mul)


FAULTS: dict[str, tuple[Callable[[Rewriter], Any], str]] = {
    "scales of another tensor": (scale_of_another, "its rows is .* which were not made together"),
    "data in the place of scales": (data_for_scale, "which were not made together"),
    "another layout": (other_layout, "has scales in another layout than it reads: moe.experts/quantize"),
    "other rows": (other_rows, "was quantised for the rows of other offsets: moe.experts/quantize"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_at_the_product(fault: str) -> None:
    plant, message = FAULTS[fault]
    r = rewriter()
    assert not list(operands_with_their_scales(r.module))
    plant(r)
    found = [sentence for sentence in check_graph(r.module) if sentence.startswith("operands with their scales")]
    assert found
    for sentence in found:
        assert display_name(product(r)) in sentence
        assert re.search(message, sentence), sentence


DIRECT = "layout={dp: 2, ep: 2, transport: direct, capacity: 2}"


@pytest.mark.parametrize(
    "options", [(FUSED, DIRECT), pytest.param(("passes.recompute.policy=full", FUSED), marks=pytest.mark.slow)]
)
def test_every_graph_with_folded_and_with_prepared_operands_holds(options: tuple[str, ...]) -> None:
    for record in compile_once(small_spec(*SPEC, *options)).records:
        for unit in record.program.units.values():
            assert not [each for module in unit.graphs.values() for each in operands_with_their_scales(module)]


def test_what_is_restored_has_the_plain_scales_that_were_kept() -> None:
    record = compile_once(small_spec(*SPEC, FUSED, "precision.mxfp8.saved='on'")).record("save-mxfp8")
    r = Rewriter(record.program.units["moe"].graphs["joint"], "mine")
    assert not list(operands_with_their_scales(r.module))
    (restored,) = r.find(_mg.mx_dequantize_rows.default)
    restored.args[0].args[0].update_arg(2, True)  # type: ignore[union-attr]
    (found,) = operands_with_their_scales(r.module)
    assert "restored: its data has scales in another layout than it reads: moe.experts/save" in found


def test_operands_of_fp8_and_their_padded_runs_hold_and_swapped_ones_do_not() -> None:
    fp8 = ("precision.fp8=rowwise", "precision.fp8_wgrad=true", FUSED)
    record = compile_once(small_spec(*BF16, *fp8)).record("fold-casts")
    r = Rewriter(record.program.units["moe"].graphs["joint"], "mine")
    assert not list(operands_with_their_scales(r.module))
    wgrad = r.find(_mg.fp8_grouped_mm_wgrad.default)[0]
    grad, rows = wgrad.args[1], wgrad.args[3]
    wgrad.update_arg(1, rows)
    wgrad.update_arg(3, grad)
    found = list(operands_with_their_scales(r.module))
    assert len(found) == 2
    assert "its grad_t is" in found[0]
    assert "its rows_t is" in found[1]
