"""fuse-experts: the same losses and gradients, with only x, the pre-activation and metadata kept."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from moegraph import ops
from moegraph.compiled import compile
from moegraph.graph.edit import Rewriter
from moegraph.graph.names import display_name
from moegraph.graph.program import Unit, ports
from moegraph.lowering import lower
from moegraph.passes import PassContext
from moegraph.passes.fuse_experts import FuseExperts
from moegraph.verify.passes import verify_spec
from tests.small_models import compute_step, random_batch, relative_error, small_spec

ON = "passes.fuse-experts.enabled=true"


def test_losses_and_every_gradient_are_those_of_the_unfused_graph() -> None:
    batch = random_batch(small_spec(), padding=3)
    plain, expected = compute_step(small_spec(), batch)
    fused, gradients = compute_step(small_spec(ON), batch)
    assert relative_error(fused.loss, plain.loss) < 1e-12
    for name, gradient in gradients.items():
        assert relative_error(gradient, expected[name]) < 1e-10, name


def test_the_region_is_one_operator_and_its_gradients_are_operators_of_their_own() -> None:
    unit = compile(small_spec(ON)).program.units["moe"]
    layer = [str(getattr(n.target, "__name__", "")) for n in unit.layer_graph.graph.nodes]
    assert layer.count("expert_ffn") == 1
    assert not {"permute", "grouped_mm", "scale_rows"} & set(layer)
    backward = [str(n.target) for n in unit.graphs["backward"].graph.nodes if n.op == "call_function"]
    for operator, count in (("expert_ffn_dgrad", 1), ("grouped_mm_wgrad_add", 2), ("grouped_mm_dgrad", 1)):
        assert sum(f"moegraph.{operator}.default" == target for target in backward) == count


def test_neither_gathered_rows_nor_activations_of_experts_are_kept() -> None:
    def kept(*overrides: str) -> set[str]:
        unit = compile(small_spec(*overrides)).program.units["moe"]
        return {
            p.name for p in ports(unit.graphs["forward"], "outputs") if p.role == "saved" and p.name.startswith("moe")
        }

    assert {"moe.rows/permute", "moe.down/grouped_mm"} <= kept()
    fused = kept(ON)
    assert not {name for name in fused if name.split("/")[0] in ("moe.rows", "moe.up", "moe.act", "moe.down")}
    assert "moe.experts/getitem.2" in fused  # z


def test_verify_proves_it_within_its_bound_and_sees_a_planted_fault() -> None:
    row = next(row for row in verify_spec(small_spec(ON, "precision.compute=bf16")).rows if row.name == "fuse-experts")
    assert row.ok, row
    assert row.planted_found
    assert row.gradient_difference <= row.tolerance


def test_a_router_that_scales_the_input_is_left_alone_and_the_pass_says_why() -> None:
    record = compile(small_spec(ON, "model.moe.router.apply=input")).record("fuse-experts")
    assert record.count == 0
    assert "input is scaled" in record.notes["moe"]


def test_it_is_off_unless_asked_for() -> None:
    assert "fuse-experts" not in [record.name for record in compile(small_spec()).records]


def test_recompute_never_runs_the_fused_experts_routing_twice() -> None:
    batch = random_batch(small_spec())
    _, expected = compute_step(small_spec(ON), batch)
    _, gradients = compute_step(small_spec(ON, "passes.recompute.policy=full"), batch)
    assert torch.equal(gradients.flat, expected.flat)


@pytest.mark.parametrize(
    "overrides",
    [
        ("model.moe.activation={kind: swiglu_clamped, limit: 0.5}",),
        pytest.param(("model.moe.expert_bias=true",), marks=pytest.mark.slow),
        ("model.moe.activation={kind: swiglu_clamped}", "model.moe.expert_bias=true"),
        pytest.param(("passes.fuse-experts.recompute=true",), marks=pytest.mark.slow),
        ("passes.fuse-experts.recompute=true", "model.moe.expert_bias=true"),
    ],
)
def test_every_kind_of_experts_has_the_losses_and_gradients_of_its_unfused_graph(overrides: tuple[str, ...]) -> None:
    batch = random_batch(small_spec(), padding=3)
    plain, expected = compute_step(small_spec(*(o for o in overrides if "passes" not in o)), batch)
    compiled = compile(small_spec(ON, *overrides))
    assert compiled.record("fuse-experts").count > 0
    fused, gradients = compute_step(small_spec(ON, *overrides), batch, compiled=compiled)
    assert relative_error(fused.loss, plain.loss) < 1e-12
    for name, gradient in gradients.items():
        assert relative_error(gradient, expected[name]) < 1e-10, name


def test_recompute_keeps_no_pre_activation_and_backward_makes_it_again() -> None:
    unit = compile(small_spec(ON, "passes.fuse-experts.recompute=true")).program.units["moe"]
    saved = {p.name for p in ports(unit.graphs["forward"], "outputs") if p.role == "saved"}
    assert not any(name.startswith("moe.experts") for name in saved)
    backward = [str(n.target) for n in unit.graphs["backward"].graph.nodes if n.op == "call_function"]
    assert backward.count("moegraph.grouped_mm.default") == 1
    assert backward.count("moegraph.permute.default") == 2  # the output's gradient, and x once for both uses


def test_a_bias_behind_the_experts_is_not_in_the_way() -> None:
    bias = "model.moe.output_bias=true"
    batch = random_batch(small_spec())
    assert compile(small_spec(ON, bias)).record("fuse-experts").count > 0
    _, expected = compute_step(small_spec(bias), batch)
    _, gradients = compute_step(small_spec(ON, bias), batch)
    assert relative_error(gradients.flat, expected.flat) < 1e-10


@pytest.mark.parametrize("transport", ["exact", "padded", "direct"])
def test_experts_between_dispatch_and_return_are_fused_under_every_transport(transport: str) -> None:
    layout = f"layout={{dp: 2, ep: 2, transport: {transport}}}"
    unit = compile(small_spec(ON, layout)).program.units["moe"]
    called = [node.target for node in unit.layer_graph.graph.nodes if node.op == "call_function"]
    assert called.count(ops.expert_ffn) == 1
    assert ops.grouped_mm not in called


def lowered_layer(*overrides: str) -> tuple[Unit, Rewriter]:
    program = lower(small_spec(*overrides))
    return program.units["moe"], Rewriter(program.units["moe"].graphs["layer"], "mine")


def note_of(unit: Unit, rewriter: Rewriter) -> str:
    edited = unit.with_graphs({"layer": rewriter.finish()})
    result = FuseExperts().apply(edited, PassContext(lower(small_spec(ON))))
    assert result.unit is edited
    return result.note


def test_products_that_read_other_offsets_are_not_fused() -> None:
    unit, rewriter = lowered_layer()
    down = rewriter.find(ops.grouped_mm)[1]
    other = rewriter.call_before(down, "moe.other", torch.clone, down.args[2])
    down.args = (*down.args[:2], other)
    assert "different orders or offsets" in note_of(unit, rewriter)


def test_a_value_that_is_used_elsewhere_is_not_fused_away() -> None:
    unit, rewriter = lowered_layer()
    act = rewriter.find(ops.grouped_mm)[1].args[0]
    assert isinstance(act, fx.Node)
    rewriter.call_before(act.next, "moe.twice", ops.scale, act, 2.0)
    assert f"{display_name(act)} is used elsewhere" in note_of(unit, rewriter)


def test_an_operator_between_the_products_is_not_passed_over() -> None:
    unit, rewriter = lowered_layer()
    down = rewriter.find(ops.grouped_mm)[1]
    scaled = rewriter.call_before(down, "moe.scaled", ops.scale, down.args[0], 2.0)
    down.args = (scaled, *down.args[1:])
    assert "not what lowering makes" in note_of(unit, rewriter)
