"""Balance losses equal their closed form in every scope; padding counts nowhere; metrics are normalised."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moegraph import ops
from moegraph.specs.schema import Balance
from moegraph.step.auxiliary import AuxiliaryRule

B, S, E, K = 3, 8, 6, 2


def routed(scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """(logits [T, E], ids [T, K], mask [T]): the second sequence is half padding, the third all padding."""
    torch.manual_seed(0)
    logits = (torch.randn(B * S, E, dtype=torch.float64) * scale).requires_grad_()
    mask = torch.ones(B, S, dtype=torch.bool)
    mask[1, 4:] = False
    mask[2] = False
    return logits, ops.route(logits, top_k=K)[1], mask.reshape(-1)


def switch(logits: Tensor, ids: Tensor, mask: Tensor, score: str, f_total: int) -> Tensor:
    """E · Σ f·P over the unmasked tokens, expert by expert."""
    kept, chosen = logits[mask], ids[mask]
    p = kept.softmax(-1) if score == "softmax" else kept.sigmoid() / kept.sigmoid().sum(-1, keepdim=True)
    total = torch.zeros((), dtype=logits.dtype)
    for expert in range(E):
        share = (chosen == expert).sum().to(logits.dtype) / chosen.numel() * f_total
        total = total + share * p[:, expert].mean()
    return total * E


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("f_norm", "f_total"), [(1, 1), ("k", K)])
def test_a8_micro_batch_loss_equals_its_closed_form(score: Any, f_norm: Any, f_total: int) -> None:
    logits, ids, mask = routed()
    loss = ops.balance_micro_batch(logits, ids, mask, score=score, top_k=K, f_norm=f_norm)
    want = switch(logits, ids, mask, score, f_total)
    torch.testing.assert_close(loss, want, rtol=1e-12, atol=0.0)
    torch.testing.assert_close(torch.autograd.grad(loss, logits)[0], torch.autograd.grad(want, logits)[0])


def test_a8_a_skewed_router_costs_at_least_half_more_than_a_uniform_one() -> None:
    torch.manual_seed(0)
    uniform = torch.randn(512, 8) * 1e-3
    skewed = uniform + torch.tensor([4.0] + [0.0] * 7)
    losses = []
    for logits in (uniform, skewed):
        ids = ops.route(logits, top_k=2)[1]
        losses.append(ops.balance_micro_batch(logits, ids, None, score="softmax", top_k=2))
    assert losses[0] == pytest.approx(1.0, abs=1e-2)
    assert losses[1] >= 1.5 * losses[0]


def test_sequence_loss_is_the_mean_of_sequences_weighed_by_their_tokens() -> None:
    logits, ids, mask = routed()
    loss = ops.balance_sequence(logits, ids, mask, score="softmax", sequences=B, top_k=K)
    parts = [slice(0, 8), slice(8, 16)]
    alone = [switch(logits[p], ids[p], mask[p], "softmax", 1) for p in parts]
    torch.testing.assert_close(loss, (8 * alone[0] + 4 * alone[1]) / 12, rtol=1e-12, atol=0.0)


def test_sequence_loss_does_not_depend_on_how_sequences_are_batched() -> None:
    logits, ids, _ = routed()
    options: dict[str, Any] = {"score": "softmax", "top_k": K}
    together = ops.balance_sequence(logits, ids, None, sequences=B, **options)
    apart = [
        ops.balance_sequence(part, chosen, None, sequences=1, **options)
        for part, chosen in zip(logits.split(S), ids.split(S), strict=True)
    ]
    torch.testing.assert_close(together, torch.stack(apart).mean(), rtol=1e-12, atol=0.0)


def test_a13_global_loss_from_sums_equals_one_big_batch_and_differs_from_the_mean_of_micro_batches() -> None:
    logits, ids, _ = routed(scale=3.0)
    whole = ops.balance_micro_batch(logits, ids, None, score="softmax", top_k=K)
    pairs = list(zip(logits.split(S), ids.split(S), strict=True))
    counts = sum(ops.expert_counts(chosen, None, E) for _, chosen in pairs)
    sums = sum(ops.probability_sum(part, None, "softmax") for part, _ in pairs)
    assert isinstance(counts, Tensor)
    assert isinstance(sums, Tensor)
    rule = AuxiliaryRule(Balance(over="global_batch", coef=1.0), E, K, 1)
    pooled, (tangent,) = rule.from_sums([counts], [sums], B * S, 1.0)
    torch.testing.assert_close(pooled, whole, rtol=1e-12, atol=0.0)
    (gradient,) = torch.autograd.grad(sums, logits, tangent)
    torch.testing.assert_close(gradient, torch.autograd.grad(whole, logits)[0])
    micro = torch.stack([ops.balance_micro_batch(*pair, None, score="softmax", top_k=K) for pair in pairs]).mean()
    assert not torch.isclose(micro, whole)


def test_a9_padding_changes_no_loss_no_count_and_no_metric() -> None:
    logits, ids, _ = routed()
    padded = torch.cat((logits, torch.randn_like(logits) * 10))
    more_ids = torch.cat((ids, torch.zeros_like(ids)))
    mask = torch.arange(2 * B * S) < B * S
    options: dict[str, Any] = {"score": "softmax", "top_k": K}

    def everything(x: Tensor, chosen: Tensor, m: Tensor | None, sequences: int) -> list[Tensor]:
        return [
            ops.balance_micro_batch(x, chosen, m, **options),
            ops.balance_sequence(x, chosen, m, sequences=sequences, **options),
            ops.z_loss(x, m),
            ops.router_entropy(x, m, "softmax"),
            ops.probability_sum(x, m, "softmax"),
            ops.expert_counts(chosen, m, E),
        ]

    for bare, with_padding in zip(
        everything(logits, ids, None, B), everything(padded, more_ids, mask, 2 * B), strict=True
    ):
        torch.testing.assert_close(bare, with_padding, rtol=1e-12, atol=0.0)
    loss = ops.balance_micro_batch(padded, more_ids, mask, **options) + ops.z_loss(padded, mask)
    grad = torch.autograd.grad(loss, padded)[0]
    assert grad[B * S :].eq(0).all()


def test_a_batch_of_padding_only_costs_zero_with_finite_gradients() -> None:
    logits, ids, _ = routed()
    nothing = torch.zeros(B * S, dtype=torch.bool)
    loss = (
        ops.balance_sequence(logits, ids, nothing, score="softmax", sequences=B, top_k=K)
        + ops.z_loss(logits, nothing)
        + ops.probability_sum(logits, nothing, "softmax").sum()
    )
    assert loss == 0
    assert torch.autograd.grad(loss, logits)[0].eq(0).all()


def test_no_tokens_cost_zero() -> None:
    logits, ids = torch.randn(0, E), torch.zeros(0, K, dtype=torch.int32)
    assert ops.balance_micro_batch(logits, ids, None, score="softmax", top_k=K) == 0
    assert ops.z_loss(logits, None) == 0
    assert ops.expert_counts(ids, None, E).tolist() == [0] * E


@pytest.mark.parametrize("level", [-80.0, -200.0, 0.0, 80.0])
@pytest.mark.parametrize("score", ["softmax", "sigmoid", "none"])
def test_a11_normalised_scores_sum_to_one_at_any_level_of_the_logits(score: Any, level: float) -> None:
    logits = (level + torch.randn(16, E)).requires_grad_()
    p = ops.router_probabilities(logits, score)
    torch.testing.assert_close(p.sum(-1), torch.ones(16), rtol=0.0, atol=1e-6)
    assert torch.autograd.grad(p.square().sum(), logits)[0].isfinite().all()


def test_a11_pushing_all_sigmoids_to_zero_does_not_lower_the_balance_loss() -> None:
    logits = torch.randn(64, E, dtype=torch.float64)
    ids = ops.route(logits, top_k=K)[1]
    losses = [
        ops.balance_micro_batch(logits + shift, ids, None, score="sigmoid", top_k=K) for shift in (0.0, -80.0, -300.0)
    ]
    assert min(losses) >= 0.9
    assert losses[2] == pytest.approx(float(losses[1]), rel=1e-9)


def test_sigmoid_probabilities_equal_the_plain_quotient() -> None:
    logits = torch.randn(16, E, dtype=torch.float64) * 4
    want = logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
    torch.testing.assert_close(ops.router_probabilities(logits, "sigmoid"), want, rtol=1e-12, atol=0.0)


def test_z_loss_is_the_mean_square_of_the_logsumexp() -> None:
    logits, _, mask = routed()
    torch.testing.assert_close(ops.z_loss(logits, mask), logits[mask].logsumexp(-1).square().mean())


def test_router_entropy_is_one_when_undecided_and_zero_when_certain() -> None:
    assert ops.router_entropy(torch.zeros(4, E), None, "softmax") == pytest.approx(1.0)
    certain = torch.zeros(4, E)
    certain[:, 2] = 500.0
    assert ops.router_entropy(certain, None, "softmax") == pytest.approx(0.0, abs=1e-6)
    assert ops.router_entropy(torch.randn(4, 1), None, "softmax") == 1.0


def test_expert_counts_counts_choices_of_unmasked_tokens() -> None:
    _, ids, mask = routed()
    want = torch.bincount(ids[mask].flatten(), minlength=E)
    counts = ops.expert_counts(ids, mask, E)
    assert torch.equal(counts, want)
    assert counts.dtype == torch.int64


def test_unknown_words_are_refused() -> None:
    logits, ids, mask = routed()
    with pytest.raises(ValueError, match="f_norm 2"):
        ops.balance_micro_batch(logits, ids, mask, score="softmax", top_k=K, f_norm=2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'tanh'"):
        ops.router_probabilities(logits, "tanh")  # type: ignore[arg-type]
