"""cast-dispatch: rows travel as payloads of MXFP8, bit for bit as if they had been quantised where they were made."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from moegraph.compiled import Compiled
from moegraph.errors import SpecError, UsageError
from moegraph.graph.dispatch_cost import TripShape, decide_trip
from moegraph.graph.edit import Rewriter
from moegraph.graph.names import display_name
from moegraph.graph.program import Port, Unit, ports, results
from moegraph.passes.cast_dispatch import CastDispatch, trips_of
from moegraph.passes.contract import PassContext
from moegraph.passes.low_precision import call_like
from moegraph.passes.pipeline import PassRecord
from moegraph.verify.distributed import execute_ranks
from moegraph.verify.inputs import local_inputs, random_inputs
from moegraph.verify.passes import verify_spec
from moegraph.verify.run import Execution, execute
from moegraph.verify.world import World
from tests.emulated_dispatch import emulated
from tests.passes.test_low_precision import targets
from tests.small_models import compile_once, small_spec

BF16 = ("precision.compute=bf16", "model.moe.d_ff=32")
SHORT = ("model.num_layers=1", "model.dense=null", "data.seq_len=8", "train.tokens_per_step=32")
ON, MX, FUSED = "precision.mxfp8.dispatch='on'", "precision.mxfp8.experts='on'", "passes.fuse-experts.enabled=true"
FULL, SELECTIVE = "passes.recompute.policy=full", "passes.recompute.policy=selective"
HIDDEN, GRAD = Port("hidden", "hidden"), Port("grad_input", "hidden")
CHUNKS = "passes.overlap-communication={mode: on, chunks: 2}"


def layout(transport: str, ep: int = 2) -> str:
    room = "" if transport == "exact" else f", capacity: {ep}"
    return f"layout={{dp: {ep}, ep: {ep}, transport: {transport}{room}}}"


def moe(record: PassRecord | Compiled) -> Unit:
    return next(unit for kind, unit in record.program.units.items() if kind.startswith("moe"))


def around(compiled: Compiled) -> tuple[Unit, Unit]:
    """The block before and after the pass."""
    place = [record.name for record in compiled.records].index("cast-dispatch")
    return moe(compiled.records[place - 1]), moe(compiled.records[place])


def reference(unit: Unit) -> Unit:
    return unit.with_graphs({"joint": emulated(unit.graphs["joint"]).finish()})


def equal(found: Sequence[Execution], expected: Sequence[Execution]) -> None:
    for rank, (now, then) in enumerate(zip(found, expected, strict=True)):
        assert now.results.keys() == then.results.keys()
        for port, value in then.results.items():
            assert torch.equal(now.results[port].nan_to_num(7), value.nan_to_num(7)), (rank, port)


CASES = {
    "padded, fused, experts too": ("padded", 2, (FUSED, MX)),
    "direct, experts too": ("direct", 2, (MX,)),
    "padded": ("padded", 2, ()),
    "padded, four ranks": ("padded", 4, (FULL,)),
    "padded, selective": ("padded", 2, (SELECTIVE,)),
    "padded, gradients added later": ("padded", 2, (FUSED, "passes.accumulate-gradients.enabled=false")),
    "padded, chunks": ("padded", 2, (CHUNKS,)),
    "padded, fused": ("padded", 2, (FUSED,)),
    "direct": ("direct", 2, ()),
    "direct, fused": ("direct", 2, (FUSED, FULL)),
    "direct, four ranks, fused, experts too": ("direct", 4, (FUSED, MX, FULL)),
    "direct, fp8 experts": ("direct", 2, (FUSED, "precision.fp8=rowwise")),
    "exact": ("exact", 2, ()),
}
EVERY_DAY = list(CASES)[:2]
MARKED = [pytest.param(case, marks=() if case in EVERY_DAY else pytest.mark.slow) for case in CASES]


def compiled_case(case: str) -> Compiled:
    transport, ep, options = CASES[case]
    return compile_once(small_spec(*SHORT, *BF16, layout(transport, ep), *options, ON))


@pytest.mark.parametrize("case", MARKED)
def test_every_bit_is_that_of_rows_quantised_before_they_travel_in_bf16(case: str) -> None:
    """One token of rank 0 and the gradient of another are NaN: so is what comes of them, and nothing of other ranks."""
    compiled = compiled_case(case)
    before, after = around(compiled)
    inputs = [dict(random_inputs(compiled.program, after.layer_graph, 0, rank)) for rank in range(CASES[case][1])]
    for port, place in ((Port("input", "hidden"), (1, 5)), (Port("tangent", "hidden"), (-1, 3))):
        inputs[0][port] = inputs[0][port].clone()
        inputs[0][port][place] = torch.nan
    found = execute_ranks(moe(compiled), inputs)
    equal(found, execute_ranks(reference(before), inputs))
    assert found[0].results[HIDDEN][1].isnan().all()
    assert found[0].results[GRAD][-1].isnan().all()
    assert not any(each.results[port].isnan().any() for each in found[1:] for port in (HIDDEN, GRAD))


def test_a_block_that_is_not_distributed_gives_the_same_with_the_same_cast() -> None:
    """Outputs and gradients of dense parameters bit for bit, of experts but for the order of a sum over ranks."""
    spread = compiled_case(EVERY_DAY[0])
    alone = compile_once(small_spec(*SHORT, *BF16, FUSED, MX, "layout={dp: 2}"))
    whole, part = reference(moe(alone.record("cast-mxfp8"))), around(spread)[1]
    inputs = [random_inputs(alone.program, whole.layer_graph, 0, rank) for rank in range(2)]
    expected = [execute(whole, each) for each in inputs]
    found = execute_ranks(part, inputs)
    for rank in range(2):
        for port, value in found[rank].results.items():
            if "moe.w_" in port.name:
                total = sum(each.results[port].double() for each in expected).chunk(2)[rank]  # type: ignore[union-attr]
                assert float((value - total).norm() / total.norm()) < 1e-2, port
            elif port in expected[rank].results:
                assert torch.equal(value, expected[rank].results[port]), (rank, port)


def wire(case: str, unit: Unit, compiled: Compiled) -> dict[str, int]:
    """Bytes of rows that rank 0 hands to its collectives, by the layer node: what simulated ranks sent. Where `direct`
    is an exchange of buckets, a bucket has a place for each slot, besides its numbers."""
    size = CASES[case][1]
    inputs = [random_inputs(compiled.program, unit.layer_graph, 0, rank) for rank in range(size)]
    world = World(size)
    world.run(lambda rank: execute(unit, local_inputs(inputs[rank.index], unit, rank.index)))
    sent: dict[str, int] = {}
    for call in world.ranks[0].calls:
        if len(call.width) == ("direct" in case) + 1 and call.dtype in (torch.bfloat16, torch.uint8):
            name = call.node.split("/")[0] + ("/grad" if "/grad" in call.node else "")
            sent[name] = sent.get(name, 0) + sum(call.send) * math.prod(call.width) * call.dtype.itemsize
    return sent


@pytest.mark.parametrize("case", EVERY_DAY)
def test_what_goes_out_is_33_of_64_bytes_and_what_returns_is_as_before(case: str) -> None:
    compiled = compiled_case(case)
    before, after = around(compiled)
    plain, low = wire(case, before, compiled), wire(case, after, compiled)
    out = {"moe.dispatch_start", "moe.return/grad"} if "padded" in case else {"moe.dispatch", "moe.return/grad"}
    home = set(plain) - out
    assert len(home) == 2
    for name in out:
        assert low[name] * 64 == plain[name] * 33, name
    for name in home:
        assert low[name] == plain[name], name


@pytest.mark.parametrize("case", MARKED)
def test_rows_are_quantised_once_and_what_is_kept_for_backward_is_their_payload(case: str) -> None:
    compiled = compiled_case(case)
    before, after = around(compiled)
    runs = 2 if CHUNKS in CASES[case][2] else 1
    was, now = targets(before.graphs["joint"]), targets(after.graphs["joint"])
    assert now.count("mx_encode") == 2 * runs
    quantised = was.count("mx_quantize_rows") - now.count("mx_quantize_rows")
    assert quantised == now.count("mx_split") == (2 if FUSED in CASES[case][2] else 1) * (MX in CASES[case][2])
    forward = moe(compiled).graphs["forward"]
    kept = [n for p, n in zip(ports(forward, "outputs"), results(forward), strict=True) if p.role == "saved"]
    payloads = [n for n in kept if n.meta["val"].dtype == torch.uint8]
    width = compiled.spec.model.d_model
    assert [n.meta["val"].shape[1] for n in payloads] == [width * 33 // 32] * runs
    arrived = payloads[0].meta["val"].shape[0]
    wide = [n.name for n in kept if tuple(n.meta["val"].shape) == (arrived, width) and n.meta["val"].itemsize == 2]
    assert not [name for name in wide if "dispatch" in name or "rows" in name or "decode" in name]
    backward = targets(moe(compiled).graphs["backward"])
    decoded = backward.count("mx_decode") + sum("payload_grouped_mm_wgrad" in name for name in backward)
    assert decoded == 2 * runs  # of rows, of gradients, by nodes of their own or where a weight gradient reads them
    assert backward.count("mx_encode") == runs


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["padded", "direct"])
def test_verify_proves_it_at_two_ranks_prints_sqnr_and_sees_a_planted_fault(transport: str) -> None:
    report = verify_spec(small_spec(*SHORT, *BF16, layout(transport), ON), world=2)
    assert report.ok
    (row,) = [row for row in report.rows if row.name == "cast-dispatch"]
    assert row.planted_found
    assert 0 < row.output_difference < 0.15
    assert "SQNR" in row.note


def test_auto_sends_in_8_bits_where_the_link_saves_more_than_the_casts_take() -> None:
    def shape(ranks: int, top_k: int, decoded: int = 2) -> TripShape:
        rows = 16384 * top_k
        return TripShape(4096, ranks, 16384, rows, rows, 2 * rows, 2 * rows, decoded, 0)

    many = decide_trip(shape(8, 4))
    assert many.low
    assert many.low_bytes * 64 == many.bf16_bytes * 33 == 64 * 33 * 16384 * 4 * 7 // 8 * 4096 // 32
    assert many.low_milliseconds < many.bf16_milliseconds
    few = decide_trip(shape(2, 1))  # half of the rows leave, and every row is quantised for itself
    assert not few.low
    assert few.low_milliseconds >= few.bf16_milliseconds
    assert not decide_trip(shape(8, 4, decoded=12)).low


def test_auto_decides_each_way_and_says_so_and_is_nothing_with_one_rank() -> None:
    compiled = compiled_case(EVERY_DAY[0])
    before, context = around(compiled)[0], PassContext(compiled.program)
    found = CastDispatch("auto", 2).apply(before, context)
    trips = trips_of(found.unit.graphs["joint"].graph)
    decisions = [CastDispatch("auto", 2).decide(trip) for trip in trips_of(before.graphs["joint"].graph)]
    assert len(decisions) == 2
    assert [trip.source.target == torch.ops.moegraph.mx_encode.default for trip in trips] == [d.low for d in decisions]
    assert found.note.count("predicted on B300") == sum(not decision.low for decision in decisions)
    alone = CastDispatch("auto", 1).apply(before, context)
    assert not alone.rewritten
    assert "no row leaves its rank" in alone.note


def test_rows_that_are_read_before_they_travel_too_stay_as_they_are_for_their_other_readers() -> None:
    compiled = compiled_case(EVERY_DAY[0])
    before, after = around(compiled)
    rewriter = Rewriter(before.graphs["joint"], "reader")
    (permute,) = [node for node in rewriter.graph.nodes if display_name(node) == "moe.rows/permute"]
    total = call_like(rewriter, permute.next.next, "total", torch.ops.aten.sum.default, permute)
    rewriter.set_output("metric", "total", total)
    read = before.with_graphs({"joint": rewriter.finish()})
    found = CastDispatch("on", 2).apply(read, PassContext(compiled.program)).unit
    inputs = [random_inputs(compiled.program, after.layer_graph, 0, rank) for rank in range(2)]
    now, then, was = execute_ranks(found, inputs), execute_ranks(after, inputs), execute_ranks(read, inputs)
    for rank in range(2):
        assert torch.equal(now[rank].results[HIDDEN], then[rank].results[HIDDEN])
        assert torch.equal(now[rank].results[Port("metric", "total")], was[rank].results[Port("metric", "total")])


def test_on_is_refused_where_another_pass_has_changed_how_rows_travel() -> None:
    compiled = compiled_case(EVERY_DAY[0])
    before = around(compiled)[0]
    rewriter = Rewriter(before.graphs["joint"], "changed")
    (packed,) = [node for node in rewriter.graph.nodes if display_name(node) == "moe.packed_rows/pack_rows"]
    packed.update_arg(0, call_like(rewriter, packed, "twice", torch.ops.aten.mul.Tensor, packed.args[0], 2.0))
    changed = before.with_graphs({"joint": rewriter.finish()})
    with pytest.raises(UsageError, match="moe sends rows otherwise than dispatch-experts made it"):
        CastDispatch("on", 2).apply(changed, PassContext(compiled.program))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((ON, layout("padded")), "needs compute bf16"),
        ((*BF16, ON), "no effect with ep 1"),
        ((*BF16, ON, layout("direct"), "model.d_model=48"), "whole blocks of 32"),
        ((*BF16, "precision.mxfp8.dispatch=auto", "model.moe=null", "model.dense={d_ff: 48}"), "without experts"),
    ],
)
def test_what_does_not_fit_is_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        small_spec(*overrides)
