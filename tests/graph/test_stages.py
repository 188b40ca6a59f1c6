"""Stages: the cut is the best there is, by a rule that leaves no choice, and it is what the spec says where it says."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from moegraph.errors import CheckFailed
from moegraph.graph.cost import Cost, instance_costs
from moegraph.graph.program import Program
from moegraph.graph.stages import assign_stages, balanced_cut, check_placement
from moegraph.lowering import lower
from moegraph.passes.pipeline import passes_for, run_pipeline
from moegraph.runtime.accounting import count_parameters, flops_per_token
from tests.small_models import small_spec

FOUR_STAGES = ("layout.pp=2", "layout.microbatches=4", "layout.schedule=interleaved_1f1b")


def placed(*overrides: str) -> dict[str, int]:
    """The stage of each block of the small model."""
    return {each.prefix: each.stage for each in assign_stages(lower(small_spec(*overrides)))}


def by_trying(costs: tuple[Cost, ...], stages: int) -> tuple[int, ...]:
    """The best of all cuts, by the rule as it is written."""

    def value(sizes: tuple[int, ...]) -> tuple[object, ...]:
        ends = list(itertools.accumulate(sizes, initial=0))
        flops = [sum(cost.flops for cost in costs[a:b]) for a, b in itertools.pairwise(ends)]
        parameters = [sum(cost.parameters for cost in costs[a:b]) for a, b in itertools.pairwise(ends)]
        return max(flops), max(parameters), sum(each**2 for each in flops), sizes[::-1]

    sizes = itertools.product(range(1, len(costs) + 1), repeat=stages)
    return min((each for each in sizes if sum(each) == len(costs)), key=value)


@pytest.mark.parametrize("seed", range(40))
def test_no_cut_is_better_than_the_one_chosen(seed: int) -> None:
    pick = random.Random(seed)
    costs = tuple(Cost(pick.randint(0, 4), pick.randint(0, 3)) for _ in range(pick.randint(1, 8)))
    stages = pick.randint(1, min(4, len(costs)))
    assert balanced_cut(costs, stages) == by_trying(costs, stages)


def test_parameters_decide_where_operations_do_not() -> None:
    costs = (Cost(2, 9), Cost(1, 9), Cost(1, 1), Cost(2, 1), Cost(9, 0))
    assert balanced_cut(costs, 3) == (1, 3, 1)
    assert balanced_cut(tuple(Cost(cost.flops, 0) for cost in costs), 3) == (2, 2, 1)


def test_of_equal_cuts_the_later_stages_have_fewer_blocks() -> None:
    assert balanced_cut((Cost(1, 1),) * 8, 3) == (3, 3, 2)
    assert balanced_cut((Cost(0, 0),) * 5, 3) == (3, 1, 1)


def test_a_stage_is_never_empty() -> None:
    assert balanced_cut((Cost(100, 0), Cost(0, 0), Cost(0, 0)), 3) == (1, 1, 1)
    with pytest.raises(ValueError, match="3 items cannot be cut into 4 stages"):
        balanced_cut((Cost(1, 1),) * 3, 4)


def test_a_deep_model_is_cut_exactly_too() -> None:
    costs = (Cost(7, 1), *[Cost(10, 1)] * 254, Cost(25, 1))
    assert balanced_cut(costs, 64) == (5, *[4] * 62, 3)  # 47 = 7 + 4 · 10; with 45 only 4 + 62 · 4 + 3 items fit


def test_costs_add_up_to_what_accounting_counts() -> None:
    spec = small_spec("layout.microbatches=2")
    program = lower(spec)
    costs = instance_costs(program)
    assert sum(cost.parameters for cost in costs) == count_parameters(program)[0]
    tokens = spec.sequences_per_microbatch * spec.data.seq_len
    assert 3 * sum(cost.flops for cost in costs) / tokens == flops_per_token(spec, program)
    assert costs[0].flops == 0 < costs[0].parameters


@pytest.mark.parametrize("fused", [False, True])
def test_room_for_rows_that_a_balanced_routing_does_not_send_costs_nothing(fused: bool) -> None:
    spec = small_spec("layout.dp=2", "layout.ep=2", f"passes.fuse-experts.enabled={str(fused).lower()}")
    records = run_pipeline(lower(spec), [p for p in passes_for(spec) if p.level == "layer"])
    before, after = records[0].program, records[-1].program
    assert [cost.flops for cost in instance_costs(before)] == [cost.flops for cost in instance_costs(after)]


def test_a_tied_embedding_counts_in_the_first_stage_only() -> None:
    tied, untied = (instance_costs(lower(small_spec(f"model.tie_embeddings={t}"))) for t in ("true", "false"))
    assert tied[0] == untied[0]
    assert untied[-1].parameters - tied[-1].parameters == untied[0].parameters


def test_the_embedding_goes_with_the_first_layer_and_the_head_with_the_last() -> None:
    names = ["embedding", "layers.0", "layers.1", "layers.2", "layers.3", "head"]
    assert placed(*FOUR_STAGES) == dict(zip(names, [0, 0, 1, 2, 3, 3], strict=True))


def test_an_expensive_head_moves_layers_forward() -> None:
    pipeline = ("layout.pp=2", "layout.microbatches=4")
    cheap, dear = placed(*pipeline), placed(*pipeline, "model.vocab_size=640")
    assert [cheap[f"layers.{i}"] for i in range(4)] == [0, 0, 1, 1]
    assert [dear[f"layers.{i}"] for i in range(4)] == [0, 0, 0, 1]


@pytest.mark.parametrize(
    ("text", "stages"),
    [
        ("embedding,0|1|2|3,head", [0, 0, 1, 2, 3, 3]),
        ("embedding|0-1,2|3|head", [0, 1, 1, 1, 2, 3]),
    ],
)
def test_the_stages_of_the_spec_are_taken_as_they_are(text: str, stages: list[int]) -> None:
    assert list(placed(*FOUR_STAGES, f'layout.stages="{text}"').values()) == stages


@pytest.fixture(scope="module")
def program() -> Program:
    return lower(small_spec())


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([0, 0, 1, 0, 1, 1], "layers.2 is in stage 0 and follows stage 1"),
        ([0, 0, 0, 2, 2, 2], "layers.2 is in stage 2 and follows stage 0"),
        ([1, 1, 1, 2, 2, 2], "embedding is in stage 1"),
        ([-1, 0, 0, 0, 0, 0], "embedding is in stage -1"),
    ],
)
def test_stages_that_are_no_runs_are_found(program: Program, stages: list[int], message: str) -> None:
    wrong = tuple(replace(each, stage=stage) for each, stage in zip(program.instances, stages, strict=True))
    with pytest.raises(CheckFailed, match=message):
        check_placement(program.instances, wrong, "mine")


def test_a_block_that_is_gone_or_swapped_is_found(program: Program) -> None:
    blocks = program.instances
    for wrong in (blocks[:-1], (blocks[0], blocks[2], blocks[1], *blocks[3:])):
        with pytest.raises(CheckFailed, match="not which blocks there are"):
            check_placement(blocks, wrong, "mine")
    check_placement(blocks, blocks, "mine")
