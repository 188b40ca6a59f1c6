"""split-pipeline: stages are set and recorded, graphs stay as they are, and what is not said about it is told."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest

from moegraph.errors import CheckFailed, RunError
from moegraph.graph.program import Instance, Program, Unit
from moegraph.lowering import lower
from moegraph.passes import Pass, PassContext, PassResult
from moegraph.passes.pipeline import run_pipeline
from moegraph.passes.split_pipeline import SplitPipeline
from moegraph.verify.passes import PassVerdict, verify_records
from tests.passes.user_passes import restored_registry
from tests.small_models import compile_once, small_spec

TWO = ("layout.pp=2", "layout.microbatches=4")
STAGES = {"embedding": 0, "layers.0": 0, "layers.1": 0, "layers.2": 1, "layers.3": 1, "head": 1}


@pytest.fixture(autouse=True)
def registered_passes_are_forgotten() -> Iterator[None]:
    with restored_registry():
        yield


@dataclass(frozen=True)
class Places(Pass):
    """A pass that does to the stages what it is told, and claims to have rewritten what it is told."""

    stages: Any = ()
    claims: Any = ()

    name: ClassVar[str] = "places"
    level: ClassVar[Any] = "layer"

    def place(self, program: Program) -> tuple[Instance, ...]:
        pairs = zip(program.instances, self.stages or [0, 0, 0], strict=True)
        return tuple(replace(instance, stage=stage) for instance, stage in pairs)

    def apply(self, unit: Unit, context: PassContext) -> PassResult:
        return PassResult(unit, self.claims, "as told")


def verdict_on(made: Pass) -> PassVerdict:
    """The verdict on one pass that runs alone on the three layers with experts."""
    program = lower(small_spec(*TWO))
    layers = replace(program, units={"moe": program.units["moe"]}, instances=program.instances_of("moe"))
    return verify_records(run_pipeline(layers, [made]))[0]


def test_blocks_get_their_stages_and_the_record_says_where_they_went() -> None:
    compiled = compile_once(small_spec(*TWO))
    record = compiled.record("split-pipeline")
    assert record.placement == STAGES
    assert {i.prefix: i.stage for i in compiled.program.instances} == STAGES
    assert {kind: list(names) for kind, names in record.rewritten.items()} == {
        "embedding": [], "dense": [], "moe": ["layers.2", "layers.3"], "head": ["head"],
    }  # fmt: skip
    assert record.notes == {
        "embedding": "stage 0: embedding",
        "dense": "stage 0: layers.0",
        "moe": "stage 0: layers.1; stage 1: layers.2, layers.3",
        "head": "stage 1: head",
    }


def test_no_graph_changes() -> None:
    records = compile_once(small_spec(*TWO)).records
    index = [record.name for record in records].index("split-pipeline")
    assert records[index].texts == records[index - 1].texts
    assert records[index].program.units == records[index - 1].program.units


def test_one_stage_is_nothing_to_do_and_the_pass_says_so() -> None:
    record = compile_once(small_spec()).record("split-pipeline")
    assert record.count == 0
    assert set(record.notes.values()) == {"pp 1: one stage"}
    assert set(record.placement.values()) == {0}


def test_the_hash_knows_the_placement() -> None:
    spec = small_spec(*TWO)
    program = lower(spec)
    hashes = set()
    for text in ("embedding,0|1-3,head", "embedding,0-1|2-3,head", "embedding,0-2|3,head"):
        with_stages = replace(program, spec=small_spec(*TWO, f'layout.stages="{text}"'))
        hashes.add(run_pipeline(with_stages, [SplitPipeline()])[1].hash)
    assert len(hashes) == 3
    lowered, placed = run_pipeline(replace(program, spec=small_spec()), [SplitPipeline()])[:2]
    assert lowered.hash == placed.hash


def test_the_pass_is_proved_where_it_acts() -> None:
    records = compile_once(small_spec(*TWO)).records
    index = [record.name for record in records].index("split-pipeline")
    (verdict,) = verify_records(list(records[index - 1 : index + 1]))
    assert verdict.ok
    assert (verdict.output_difference, verdict.gradient_difference, verdict.rewritten) == (0.0, 0.0, 3)
    assert verdict.planted_found
    assert verdict.nodes == {"moe": ("layers.2", "layers.3"), "head": ("head",)}


def test_blocks_that_moved_without_a_word_are_told() -> None:
    verdict = verdict_on(Places([0, 0, 1]))
    assert not verdict.ok
    assert verdict.note == "places: moe is changed, but no rewritten node is named"


def test_blocks_that_are_said_to_have_moved_and_did_not_are_told() -> None:
    verdict = verdict_on(Places(claims=("layers.3",)))
    assert not verdict.ok
    assert verdict.note == "places: moe is as it was, but rewritten nodes are named"


def test_blocks_that_moved_as_said_are_fine() -> None:
    assert verdict_on(Places([0, 0, 1], ("layers.3",))).ok


def test_stages_that_are_no_runs_end_the_pipeline() -> None:
    with pytest.raises(CheckFailed, match=r"after places: layers\.2 is in stage 2 and follows stage 0"):
        verdict_on(Places([0, 2, 2]))


def test_a_pass_that_places_nothing_sensible_is_named() -> None:
    class Nothing(Places):
        def place(self, program: Program) -> Any:
            return list(program.instances)

    class Fails(Places):
        def place(self, program: Program) -> Any:
            raise ZeroDivisionError("oh")

    with pytest.raises(RunError, match="pass 'places' returned list for the blocks, not a tuple"):
        verdict_on(Nothing())
    with pytest.raises(RunError, match="pass 'places' fails on the blocks: ZeroDivisionError: oh"):
        verdict_on(Fails())
