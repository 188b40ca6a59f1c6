"""fold-decodes: weight gradients read payloads where nothing else reads the decoded rows; no bit changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moegraph.compiled import Compiled
from moegraph.graph.edit import Rewriter
from moegraph.graph.names import display_name, facts
from moegraph.graph.program import Port, Unit
from moegraph.passes.accumulate_gradients import AccumulateGradients
from moegraph.passes.contract import PassContext, PassResult
from moegraph.passes.fold_decodes import FoldDecodes
from moegraph.passes.pipeline import passes_for
from moegraph.verify.distributed import execute_ranks
from moegraph.verify.inputs import random_inputs
from tests.passes.test_cast_dispatch import BF16, CHUNKS, FULL, FUSED, MX, ON, SELECTIVE, SHORT, equal, layout, moe
from tests.passes.test_low_precision import targets
from tests.small_models import compile_once, small_spec

_mg = torch.ops.moegraph
OFF, LATER = "passes.fold-decodes.enabled=false", "passes.accumulate-gradients.enabled=false"
UP, WEIGHTED = "moegraph.grouped_mm", "aten._to_copy"  # separate experts: y · row weight is another node
# Transport, options, how many weight gradients read payloads and what keeps the decodes that stay.
CASES = {
    "padded, fused, experts too": ("padded", (FUSED, MX), 2, ()),
    "direct, bf16": ("direct", (), 1, (UP, WEIGHTED)),
    "direct, experts too": ("direct", (MX,), 1, (WEIGHTED,)),
    "padded, fused, bf16": ("padded", (FUSED,), 1, ("moegraph.expert_ffn", "moegraph.expert_ffn_dgrad")),
    "direct, fp8 experts": ("direct", (FUSED, "precision.fp8=rowwise"), 1, ("moegraph.fp8_quantize_rows",)),
    "weight gradients too": (
        "direct",
        (FUSED, MX, "precision.mxfp8.wgrad='mxfp8'"),
        0,
        ("moegraph.mx_quantize_ragged_columns",),
    ),
    "selective": ("padded", (SELECTIVE,), 1, (UP, WEIGHTED)),
    "full": ("direct", (FULL,), 0, (UP, WEIGHTED)),
    "gradients added later": ("direct", (FUSED, MX, LATER), 2, ()),
    "chunks": ("padded", (MX, CHUNKS), 2, (WEIGHTED,)),
}
MARKED = [pytest.param(case, marks=() if case in list(CASES)[:2] else pytest.mark.slow) for case in CASES]


def compiled_case(case: str, *more: str) -> Compiled:
    transport, options, *_ = CASES[case]
    return compile_once(small_spec(*SHORT, *BF16, layout(transport), *options, ON, *more))


@pytest.mark.parametrize("case", [MARKED[0], *(pytest.param(each, marks=pytest.mark.slow) for each in list(CASES)[1:])])
def test_every_bit_is_that_of_decoded_rows(case: str) -> None:
    compiled = compiled_case(case)
    unit = moe(compiled)
    inputs = [dict(random_inputs(compiled.program, unit.layer_graph, 0, rank)) for rank in range(2)]
    inputs[0][Port("input", "hidden")][1, 5] = torch.nan
    equal(execute_ranks(unit, inputs), execute_ranks(moe(compiled_case(case, OFF)), inputs))


@pytest.mark.parametrize("case", MARKED)
def test_weight_gradients_read_payloads_where_nothing_else_reads_bf16_and_else_it_says_what_does(case: str) -> None:
    _, options, count, others = CASES[case]
    compiled = compiled_case(case)
    record = compiled.record("fold-decodes")
    backward = targets(moe(compiled).graphs["backward"])
    returned = LATER in options or CHUNKS in options  # of chunks, a sum
    joint = moe(record).graphs["joint"]
    assert targets(joint).count("payload_grouped_mm_wgrad") == count
    assert backward.count("payload_grouped_mm_wgrad") == (count if returned else 0)
    assert backward.count("payload_grouped_mm_wgrad_add") == (0 if returned else count)
    (note,) = [note for kind, note in record.notes.items() if kind.startswith("moe")]
    assert {part.split(": ")[1] for part in note.split("; ") if part} == {f"{each} reads it in bf16" for each in others}
    assert bool(others) == ("mx_decode" in targets(joint))


def applied(
    unit: Unit, compiled: Compiled, *passes: FoldDecodes | AccumulateGradients
) -> tuple[Unit, list[PassResult]]:
    found = []
    for each in passes:
        found.append(each.apply(unit, PassContext(compiled.program)))
        unit = found[-1].unit
    return unit, found


def test_it_gives_the_same_before_and_behind_accumulate_gradients() -> None:
    compiled = compiled_case("padded, fused, experts too")
    place = [record.name for record in compiled.records].index("fold-decodes")
    before = moe(compiled.records[place - 1])
    first, _ = applied(before, compiled, FoldDecodes(), AccumulateGradients())
    then, found = applied(before, compiled, AccumulateGradients(), FoldDecodes())
    assert targets(first.graphs["joint"]) == targets(then.graphs["joint"])
    assert targets(then.graphs["joint"]).count("payload_grouped_mm_wgrad_add") == 2
    assert sorted(found[1].rewritten) == sorted(dict.fromkeys(found[1].rewritten))
    for graph in (first, then):
        nodes = [n for n in graph.graphs["joint"].graph.nodes if n.target is _mg.payload_grouped_mm_wgrad_add.default]
        assert all(n.meta["val"].shape == (0,) for n in nodes)


def test_a_decode_that_something_else_reads_too_stays_and_so_does_its_weight_gradient() -> None:
    compiled = compiled_case("padded, fused, experts too")
    place = [record.name for record in compiled.records].index("fold-decodes")
    before = moe(compiled.records[place - 1])
    rewriter = Rewriter(before.graphs["joint"], "reader")
    decode = rewriter.find(_mg.mx_decode.default)[0]
    total = rewriter.call_before(decode.next, "total", torch.ops.aten.sum.default, decode)
    facts(total).update(layer=facts(decode)["layer"], direction="backward")
    rewriter.set_output("metric", "total", total)
    (changed,) = applied(before.with_graphs({"joint": rewriter.finish()}), compiled, FoldDecodes())[1]
    assert targets(changed.unit.graphs["joint"]).count("payload_grouped_mm_wgrad") == 1
    assert changed.note == f"{display_name(decode)}: aten.sum reads it in bf16"


def test_it_is_there_only_where_rows_travel_in_mxfp8_and_can_be_switched_off() -> None:
    def names(*options: str) -> list[str]:
        return [p.name for p in passes_for(small_spec(*BF16, layout("padded"), *options))]

    assert "fold-decodes" in names(ON)
    assert "fold-decodes" not in names()
    assert "fold-decodes" not in names(ON, OFF)


def test_a_block_without_payloads_is_left_as_it_is() -> None:
    compiled = compiled_case("padded, fused, experts too")
    unit = replace(moe(compiled.record("cast-mxfp8")))
    (found,) = applied(unit, compiled, FoldDecodes())[1]
    assert not found.rewritten
    assert found.note == "nothing is decoded in this block"
    assert found.unit is unit
