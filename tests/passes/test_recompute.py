"""recompute: the same numbers with less kept, and nothing computed twice that must not be."""

from __future__ import annotations

import pytest
import torch

from moegraph.compiled import Compiled
from moegraph.graph.program import ports
from tests.small_models import compile_once, compute_step, random_batch, small_spec

POLICIES = ["none", "selective", "full"]


def with_policy(policy: str, *more: str) -> Compiled:
    return compile_once(small_spec(f"passes.recompute.policy={policy}", *more))


def saved_bytes(compiled: Compiled) -> int:
    total = 0
    for unit in compiled.program.units.values():
        module = unit.graphs["forward"]
        values = next(iter(module.graph.find_nodes(op="output"))).meta["val"]
        for port, value in zip(ports(module, "outputs"), values, strict=True):
            total += value.numel() * value.element_size() if port.role == "saved" else 0
    return total


def test_every_policy_gives_bitwise_the_same_losses_and_gradients() -> None:
    batch = random_batch(small_spec())
    results = [compute_step(small_spec(f"passes.recompute.policy={p}"), batch) for p in POLICIES]
    for computed, gradients in results[1:]:
        assert torch.equal(gradients.flat, results[0][1].flat)
        assert torch.equal(computed.loss, results[0][0].loss)


def test_a6_recomputing_does_not_change_the_logged_balance_loss() -> None:
    batch = random_batch(small_spec())
    none, full = (compute_step(small_spec(f"passes.recompute.policy={p}"), batch)[0] for p in ("none", "full"))
    assert float(none.balance) > 0
    assert torch.equal(none.balance, full.balance)
    assert torch.equal(none.z, full.z)
    assert none.expert_counts is not None
    assert full.expert_counts is not None
    assert torch.equal(none.expert_counts, full.expert_counts)


def test_each_policy_keeps_less_than_the_one_before() -> None:
    none, selective, full = (saved_bytes(with_policy(p)) for p in POLICIES)
    assert full < selective < none


@pytest.mark.parametrize("policy", ["selective", "full"])
def test_routing_and_dispatched_rows_are_kept_and_never_computed_again(policy: str) -> None:
    unit = next(u for k, u in with_policy(policy).program.units.items() if k.startswith("moe"))
    backward = [str(n.target) for n in unit.graphs["backward"].graph.nodes if n.op == "call_function"]
    for operator in ("choose_experts", "sort_by_expert"):
        assert not any(operator in target for target in backward)
    saved = {port.name for port in ports(unit.graphs["forward"], "outputs") if port.role == "saved"}
    assert "moe.rows/permute" in saved


def test_a38_exact_ties_train_under_full_recompute() -> None:
    spec = small_spec("passes.recompute.policy=full")
    batch = random_batch(spec)
    batch.tokens.fill_(3)  # identical tokens: rows of a document start alike and many logits tie
    computed, gradients = compute_step(spec, batch)
    _, expected = compute_step(small_spec(), batch)
    assert torch.isfinite(computed.loss)
    assert torch.equal(gradients.flat, expected.flat)


def test_layers_named_in_the_spec_get_the_policy_and_the_others_do_not() -> None:
    compiled = compile_once(small_spec("passes.recompute={policy: full, layers: [1]}"))
    kinds = {instance.prefix: instance.kind for instance in compiled.program.instances}
    assert kinds["layers.1"] == "moe.recompute_full"
    assert kinds["layers.2"] == kinds["layers.3"] == "moe"
    record = compiled.record("recompute")
    assert record.rewritten["moe.recompute_full"]
    assert not record.rewritten["moe"]


def test_duplicates_say_that_recompute_made_them_and_stand_in_backward() -> None:
    compiled = with_policy("full")
    unit = next(u for k, u in compiled.record("recompute").program.units.items() if k.startswith("moe"))
    made = [n for n in unit.graphs["joint"].graph.nodes if n.meta["custom"].get("made_by") == "recompute"]
    assert made
    assert all(n.meta["custom"]["direction"] == "backward" and n.meta["custom"]["recomputed"] for n in made)
