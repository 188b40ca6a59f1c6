"""The numeric verifier: one wrong value is found and named, an honest bound is kept, silence is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from moegraph import ops
from moegraph.graph.edit import Rewriter
from moegraph.graph.names import display_name
from moegraph.graph.program import Port, Unit
from moegraph.passes import PassContext, PassResult, registry
from moegraph.passes.pipeline import run_pipeline
from moegraph.verify.compare import Difference, compare, relative_difference
from moegraph.verify.passes import PassVerdict, VerifyReport, verify_records, verify_spec
from moegraph.verify.plant import plant_fault
from moegraph.verify.references import auxiliary_error
from moegraph.verify.run import Execution, deterministic_threads, execute
from tests.passes.user_passes import insert_after, pass_class, restored_registry, scale_experts
from tests.small_models import small_spec
from tests.step.kinds import CASES, compiled_case, inputs_of


@pytest.fixture(autouse=True)
def registered_passes_are_forgotten() -> Iterator[None]:
    with restored_registry():
        yield


def verdict_on(pass_type: Any, case: str = "plain", **options: Any) -> PassVerdict:
    """The verdict on one layer pass that runs alone on the lowered program of a case."""
    program = compiled_case(case).record("lower").program
    records = run_pipeline(program.with_units({"moe": program.units["moe"]}), [pass_type()])
    (verdict, _) = verify_records(records, **options)
    assert verdict.name == pass_type.name
    return verdict


def test_one_changed_value_is_found_and_the_first_node_that_differs_is_named() -> None:
    verdict = verdict_on(pass_class("mine", apply=scale_experts(1 + 2**-50)))
    assert not verdict.ok
    assert verdict.first_difference == "moe: moe.sum"
    assert 0 < verdict.output_difference < 1e-12


def test_a_step_pass_that_changes_only_a_gradient_is_found() -> None:
    def double(rewriter: Rewriter, unit: Unit, context: PassContext) -> None:
        for node in rewriter.find(torch.ops.moegraph.grouped_mm_wgrad.default):
            new = insert_after(rewriter, node, "doubled", torch.ops.aten.mul.Tensor, 2.0)
            new.meta["custom"].update(layer=node.meta["custom"]["layer"], direction="backward")

    program = compiled_case("plain").record("lower").program
    mine = pass_class("mine", "step", double, requires={"joint"})()
    verdict = verify_records(run_pipeline(program.with_units({"moe": program.units["moe"]}), [mine]))[-1]
    assert not verdict.ok
    assert verdict.output_difference == 0.0
    assert verdict.gradient_difference == pytest.approx(1.0)
    assert verdict.first_difference == "moe: grad moe.w_up"  # no node of the joint graph differs, the result does


@pytest.mark.parametrize(("factor", "holds"), [(1.0 + 1e-4, True), (1.0 + 1e-2, False)])
def test_a_close_pass_holds_within_its_bound_and_fails_beyond(factor: float, holds: bool) -> None:
    mine = pass_class("mine", apply=scale_experts(factor), tier="close", tolerance=1e-3)
    verdict = verdict_on(mine)
    assert verdict.ok is holds
    assert verdict.tolerance == 1e-3
    assert (verdict.first_difference is None) is holds
    assert verdict.planted_found


def silent(self: Any, unit: Unit, context: PassContext) -> PassResult:
    return PassResult(unit)


def boastful(self: Any, unit: Unit, context: PassContext) -> PassResult:
    return PassResult(unit, ["moe.combine"])


def secretive(self: Any, unit: Unit, context: PassContext) -> PassResult:
    rewriter = Rewriter(unit.graphs["layer"], "mine")
    scale_experts(1.0)(rewriter, unit, context)
    return PassResult(unit.with_graphs({"layer": rewriter.finish()}), note="nothing to do")


@pytest.mark.parametrize(
    ("apply", "note"),
    [
        (silent, "mine rewrote nothing in moe and does not say why"),
        (boastful, "mine: moe is as it was, but rewritten nodes are named"),
        (secretive, "mine: moe is changed, but no rewritten node is named"),
    ],
)
def test_what_a_pass_says_and_what_it_does_must_agree(apply: Callable[..., PassResult], note: str) -> None:
    mine = pass_class("mine")
    mine.apply = apply  # type: ignore[method-assign]
    verdict = verdict_on(mine, plant=False)
    assert not verdict.ok
    assert verdict.note == note
    assert not VerifyReport([verdict], "").ok


def test_a_pass_that_says_why_it_rewrote_nothing_holds() -> None:
    verdict = verdict_on(pass_class("mine"))
    assert verdict.ok
    assert verdict.note == "nothing to rewrite: nothing to do"
    assert verdict.planted_found is None


def test_a_wrong_auxiliary_loss_is_found_against_its_reference() -> None:
    record = compiled_case("only a z loss").record("balance-losses")
    unit = record.program.units["moe"]
    moe = record.program.spec.model.moe
    assert moe is not None
    inputs = inputs_of(record.program, unit)
    assert auxiliary_error(unit.graphs["layer"], execute(unit, inputs).values, moe) < 1e-12  # type: ignore[operator]
    planted = plant_fault(unit, ["moe.z_loss"])
    assert planted is not None
    wrong, name = planted
    assert name == "moe.z_loss"
    error = auxiliary_error(wrong.graphs["layer"], execute(wrong, inputs).values, moe)
    assert error == pytest.approx(0.0625)


EVERY_DAY = {
    "plain", "bf16", "windows", "norm before and after", "tied embeddings", "clamped experts with biases",
    "sigmoid, grouped, biased, summed", "weights on the input", "balance over the global batch", "full recompute",
    "selective recompute", "gated shared experts", "one token", "only dense",
}  # fmt: skip


@pytest.mark.parametrize("case", [pytest.param(c, marks=() if c in EVERY_DAY else pytest.mark.slow) for c in CASES])
def test_every_pass_of_every_case_holds_and_its_planted_fault_is_found(case: str) -> None:
    rows = verify_records(list(compiled_case(case).records))
    layer = ["canonicalize", "balance-losses", "dispatch-experts", "split-pipeline"]
    assert [row.name for row in rows] == [*layer, "trace", "recompute", "accumulate-gradients", "split-backward"]
    for row in rows:
        assert row.ok, row
        assert row.output_difference == row.gradient_difference == 0.0
        assert row.planted_found is (True if row.rewritten or row.name == "trace" else None), row
    assert rows[-3].rewritten > 0 or "recompute" not in case


@pytest.mark.parametrize("graph", ["forward", "backward", "backward_input", "backward_weight", "evaluate"])
def test_a_fault_in_any_of_the_cut_graphs_is_found(graph: str) -> None:
    before, after = compiled_case("plain").records[-2:]
    unit = after.program.units["moe"]
    inputs = inputs_of(before.program, unit)
    with deterministic_threads():
        planted = plant_fault(unit, [], graph)
        assert planted is not None
        expected = execute(before.program.units["moe"], inputs)
        assert compare(expected, execute(unit, inputs), 0.0).within(0.0)
        assert not compare(expected, execute(planted[0], inputs), 0.0).within(0.0)


def test_a_planted_fault_changes_one_value_and_leaves_the_unit_alone() -> None:
    unit = compiled_case("plain").record("balance-losses").program.units["moe"]
    before = len(unit.graphs["layer"].graph.nodes)
    planted = plant_fault(unit, ["moe.act"])
    assert planted is not None
    assert planted[1] == "moe.act"
    assert len(unit.graphs["layer"].graph.nodes) == before
    wrong = [n for n in planted[0].graphs["layer"].graph.nodes if display_name(n) == "moe.act.wrong"]
    assert [node.target for node in wrong] == [ops.scale]


def test_verify_of_a_spec_reports_every_pass_and_the_structural_verifiers() -> None:
    report = verify_spec(small_spec("model.num_layers=2"))
    assert report.ok
    data = report.to_json()
    assert data["ok"] is True
    assert len(data["structural"]) == 7
    assert [row["name"] for row in data["passes"]] == [row.name for row in report.rows]


# --- comparing ---------------------------------------------------------------------------------------------------

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, NAN], [1.0, NAN], 0.0),
        ([1.0, INF], [1.0, INF], 0.0),
        ([1.0, 4.0], [1.0, 2.0], 1.0),
        ([1.0, 4.0, NAN], [1.0, 2.0, NAN], 1.0),
        ([1.0, 4.0, INF], [1.0, 2.0, INF], 1.0),
        ([1.0, 0.0], [1.0, NAN], INF),
        ([1.0, NAN], [1.0, 0.0], INF),
        ([1.0, INF], [1.0, 0.0], INF),
        ([1.0, 0.0], [1.0, INF], INF),
        ([1.0, NAN], [1.0, INF], INF),
        ([1.0, -INF], [1.0, INF], INF),
        ([0.0], [0.0], 0.0),
        ([], [], 0.0),
    ],
)
def test_the_relative_difference_sees_infinities_and_nans(a: list[float], b: list[float], expected: float) -> None:
    assert relative_difference(torch.tensor(a), torch.tensor(b)) == expected


def test_the_smallest_difference_is_not_zero() -> None:
    huge = torch.tensor([1e300, 0.0], dtype=torch.float64)
    assert relative_difference(huge + torch.tensor([0.0, 5e-324], dtype=torch.float64), huge) > 0.0


def test_other_shapes_dtypes_and_integers_are_infinitely_different() -> None:
    ones = torch.ones(2)
    assert relative_difference(ones, torch.ones(3)) == INF
    assert relative_difference(ones, ones.double()) == INF
    assert relative_difference(torch.tensor([1, 2]), torch.tensor([1, 3])) == INF


def test_a_missing_output_is_a_breach_and_a_metric_may_become_a_loss() -> None:
    value = {Port("metric", "probability_sum"): torch.ones(2)}
    assert compare(Execution(value), Execution({Port("auxiliary", "probability_sum"): torch.ones(2)}), 0.0).within(0.0)
    lost = compare(Execution(value), Execution({}), 0.0)
    assert lost.missing == ("metric probability_sum",)
    assert not lost.within(1.0)


def test_a_difference_is_within_a_bound_only_with_nothing_missing() -> None:
    assert Difference(0.0, 0.1, None).within(0.1)
    assert not Difference(0.0, 0.2, None).within(0.1)
    assert not Difference(0.2, 0.0, None).within(0.1)


def test_registered_passes_are_proved_too() -> None:
    registry.register(pass_class("mine", apply=scale_experts(2.0)))
    report = verify_spec(small_spec("model.num_layers=2"), plant=False)
    assert not report.ok
    assert [row.name for row in report.rows if not row.ok] == ["mine"]
