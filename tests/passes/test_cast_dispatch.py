"""cast-dispatch: rows travel as payloads of MXFP8, bit for bit as if they had been quantised where they were made."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from moegraph.compiled import Compiled
from moegraph.graph.edit import Rewriter
from moegraph.graph.program import Unit
from moegraph.passes.cast_dispatch import trips_of
from moegraph.passes.low_precision import call_like
from moegraph.verify.distributed import execute_ranks
from moegraph.verify.inputs import random_inputs
from moegraph.verify.run import Execution
from tests.small_models import compile_once, small_spec

BF16 = ("precision.compute=bf16", "model.moe.d_ff=32")
SHORT = ("model.num_layers=1", "model.dense=null", "data.seq_len=8", "train.tokens_per_step=32")
ON, MX, FUSED = "precision.mxfp8.dispatch='on'", "precision.mxfp8.experts='on'", "passes.fuse-experts.enabled=true"
FULL = "passes.recompute.policy=full"
_mg = torch.ops.moegraph


def layout(transport: str, ep: int = 2) -> str:
    room = "" if transport == "exact" else f", capacity: {ep}"
    return f"layout={{dp: {ep}, ep: {ep}, transport: {transport}{room}}}"


def moe_unit(compiled: Compiled) -> Unit:
    return next(unit for kind, unit in compiled.program.units.items() if kind.startswith("moe"))


def joint_before(compiled: Compiled, name: str = "recompute") -> Unit:
    """The block's joint graph as the steps up to a pass left it."""
    names = [record.name for record in compiled.records]
    last = names.index(name) if name in names else names.index("split-backward") - 1
    return next(u for kind, u in compiled.records[last].program.units.items() if kind.startswith("moe"))


def emulated(unit: Unit) -> Unit:
    """What rows and gradients are made of is quantised and made bf16 again at once; they travel in bf16."""
    rewriter = Rewriter(unit.graphs["joint"], "emulated")
    for trip in trips_of(rewriter.graph):
        first = trip.moved[0]
        payload = call_like(rewriter, first, "mx_encode", _mg.mx_encode.default, trip.source)
        first.update_arg(0, call_like(rewriter, first, "mx_decode", _mg.mx_decode.default, payload))
    assert len(rewriter.rewritten) in (4, 8)
    return unit.with_graphs({"joint": rewriter.finish()})


def equal(found: Sequence[Execution], expected: Sequence[Execution]) -> None:
    for rank, (now, then) in enumerate(zip(found, expected, strict=True)):
        for port, value in then.results.items():
            assert torch.equal(now.results[port], value), (rank, port)


CASES = {
    "padded": ("padded", ()),
    "direct, fused": ("direct", (FUSED,)),
    "padded, fused, experts too": ("padded", (FUSED, MX)),
    "direct, experts too": ("direct", (MX,)),
    "exact": ("exact", ()),
    "padded, chunks": ("padded", ("passes.overlap-communication={mode: on, chunks: 2}",)),
}


@pytest.mark.parametrize("case", CASES)
def test_every_bit_is_that_of_rows_quantised_before_they_travel_in_bf16(case: str) -> None:
    transport, options = CASES[case]
    plain = compile_once(small_spec(*SHORT, *BF16, layout(transport), *options))
    low = compile_once(small_spec(*SHORT, *BF16, layout(transport), *options, ON))
    before = joint_before(plain, "x")
    print([r.name for r in plain.records])
    inputs = [random_inputs(plain.program, before.layer_graph, 0, rank) for rank in range(2)]
    equal(execute_ranks(joint_before(low, "x"), inputs), execute_ranks(emulated(before), inputs))
