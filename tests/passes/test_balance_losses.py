"""balance-losses: the loss the spec names, once, over the tokens it names, with the gradient it should have."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moegraph.passes.balance_losses import definition
from moegraph.verify.references import balance_reference, z_reference
from tests.everyday import everyday
from tests.small_models import compile_once, compute_step, random_batch, relative_error, small_spec, start_values

COEF = "model.moe.balance.coef"


def balance(**fields: object) -> str:
    text = ", ".join(f"{k}: {v}" for k, v in {"coef": 0.5, "z_coef": 0.0, **fields}.items())
    return f"model.moe.balance={{{text}}}"


def router_gradients(*overrides: str) -> Tensor:
    spec = small_spec(*overrides)
    _, gradients = compute_step(spec, random_batch(spec))
    return torch.cat([g.flatten() for n, g in gradients.items() if "router" in n])


def test_a7_the_coefficient_changes_the_routers_gradient() -> None:
    assert relative_error(router_gradients(balance(coef=0.5)), router_gradients(balance(coef=0.0))) > 1e-3


@pytest.mark.parametrize("over", ["micro_batch", "sequence", "global_batch"])
@pytest.mark.parametrize("layers", everyday(["mean", "sum"]))
def test_the_gradient_is_that_of_the_reported_loss(over: str, layers: str) -> None:
    """Central differences of loss + balance + z in one direction of parameter space, float64."""
    spec = small_spec(balance(over=over, layers=layers, coef=3.0, z_coef=0.7))
    _check_gradient(spec)


@pytest.mark.parametrize("f_norm", ["1", "k"])
def test_the_gradient_of_a_pooled_loss_is_that_of_the_reported_loss(f_norm: str) -> None:
    _check_gradient(small_spec(balance(over="micro_batch", layers="pooled", coef=3.0, f_norm=f_norm)))


def _check_gradient(spec: object) -> None:
    compiled = compile_once(spec)  # type: ignore[arg-type]
    batch = random_batch(spec, padding=3)  # type: ignore[arg-type]
    values = start_values(compiled.program)
    generator = torch.Generator().manual_seed(5)
    step = {n: torch.randn(v.shape, generator=generator, dtype=v.dtype) for n, v in values.items()}

    def total(scale: float) -> float:
        moved = {n: v + scale * step[n] for n, v in values.items()}
        computed, _ = compute_step(spec, batch, moved, compiled)  # type: ignore[arg-type]
        return float(computed.loss + computed.balance + computed.z)

    _, gradients = compute_step(spec, batch, values, compiled)  # type: ignore[arg-type]
    slope = sum(float((g * step[n]).sum()) for n, g in gradients.items())
    measured = (total(1e-6) - total(-1e-6)) / 2e-6
    assert slope == pytest.approx(measured, rel=2e-4)


def test_a10_the_auxiliary_losses_are_added_once_however_the_step_is_cut() -> None:
    """Four micro-batches of a sequence each report what one micro-batch of four reports, and give its gradients."""
    spec, batch = small_spec(), random_batch(small_spec())
    whole, expected = compute_step(spec, batch)
    parts, gradients = compute_step(small_spec("layout.microbatches=4"), batch)
    assert relative_error(parts.balance, whole.balance) < 1e-12
    assert relative_error(parts.z, whole.z) < 1e-12
    assert relative_error(gradients.flat, expected.flat) < 1e-10


def test_a13_a_global_batch_loss_over_micro_batches_is_the_one_big_batch_loss() -> None:
    override, batch = balance(over="global_batch"), random_batch(small_spec())
    whole, expected = compute_step(small_spec(override), batch)
    parts, gradients = compute_step(small_spec(override, "layout.microbatches=4", "layout.schedule=gpipe"), batch)
    assert relative_error(parts.balance, whole.balance) < 1e-12
    assert relative_error(gradients.flat, expected.flat) < 1e-10
    micro = compute_step(small_spec(balance(over="micro_batch"), "layout.microbatches=4"), batch)[0]
    assert relative_error(micro.balance, whole.balance) > 1e-4  # they are different losses


@pytest.mark.parametrize("over", ["micro_batch", "sequence", "global_batch"])
def test_a9_padding_changes_neither_the_losses_nor_the_counts(over: str) -> None:
    spec = small_spec(balance(over=over, z_coef=0.1))
    batch = random_batch(spec, padding=8)
    changed = random_batch(spec, padding=8)
    changed.tokens[batch.document_ids < 0] = 7  # other padding, the same real tokens
    first, first_gradients = compute_step(spec, batch)
    second, second_gradients = compute_step(spec, changed)
    # Other padding moves rows within the grouped products, so sums are rounded differently, no more.
    assert relative_error(first.balance, second.balance) < 1e-12
    assert relative_error(first.z, second.z) < 1e-12
    assert first.expert_counts is not None
    assert second.expert_counts is not None
    assert torch.equal(first.expert_counts, second.expert_counts)
    assert int(first.expert_counts.sum()) == 3 * 2 * int((batch.document_ids >= 0).sum())
    name = "layers.1.moe.router.weight"
    assert relative_error(first_gradients[name], second_gradients[name]) < 1e-12


def test_a8_a_skewed_router_pays_more_than_a_uniform_one() -> None:
    moe = small_spec().model.moe
    assert moe is not None
    uniform, skewed = torch.zeros(64, 8), torch.zeros(64, 8)
    skewed[:, 0] = 4.0
    ids = torch.stack([torch.arange(64) % 8, (torch.arange(64) + 1) % 8], 1)
    even = balance_reference(uniform, ids, None, moe, 1)
    assert even == pytest.approx(1.0)
    assert balance_reference(skewed, torch.zeros_like(ids), None, moe, 1) > 1.5 * even


def test_the_reported_losses_are_those_of_the_float64_reference() -> None:
    from moegraph.verify.passes import verify_spec

    report = verify_spec(small_spec(), plant=False)
    row = next(row for row in report.rows if row.name == "balance-losses")
    assert row.ok, row.note
    assert row.output_difference == row.gradient_difference == 0.0


def test_z_reference_is_the_mean_square_of_logsumexp() -> None:
    logits = torch.randn(10, 4)
    assert z_reference(logits, None) == pytest.approx(float(torch.logsumexp(logits.double(), 1).square().mean()))


def test_off_or_without_coefficients_nothing_is_added_and_the_pass_says_why() -> None:
    for override in (balance(coef=0.0), "passes.balance-losses={enabled: false}"):
        spec = small_spec(override)
        computed, _ = compute_step(spec, random_batch(spec))
        assert float(computed.balance) == float(computed.z) == 0.0
    notes = compile_once(small_spec(balance(coef=0.0))).record("balance-losses").notes
    assert all(notes.values())


def test_the_definition_names_scope_normalisation_and_coefficient() -> None:
    text = definition(small_spec(balance(over="sequence", f_norm="k", z_coef=0.25)))
    for part in ("0.5 ·", "each sequence", "Σ f = top_k = 2", "0.25 ·", "padding not counted", "added once"):
        assert part in text
