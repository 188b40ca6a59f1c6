"""fuse-experts: the same losses and gradients, with only x, the pre-activation and metadata kept."""

from __future__ import annotations

import torch

from moegraph.compiled import compile
from moegraph.graph.program import ports
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
    for operator, count in (("expert_ffn_dgrad", 1), ("grouped_mm_wgrad", 2), ("grouped_mm_dgrad", 1)):
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
