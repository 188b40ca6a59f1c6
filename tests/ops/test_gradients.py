"""Every gradient formula equals finite differences in float64 (E=3, K=2, T=5, one expert without tokens)."""

from __future__ import annotations

import pytest
import torch

from moegraph import ops

from .op_cases import CASES, Case


@pytest.mark.parametrize("case", [c for c in CASES if c.differentiable], ids=lambda c: c.name)
def test_gradient_equals_finite_differences(case: Case) -> None:
    inputs = [t.requires_grad_(t.is_floating_point()) for t in case.inputs(torch.float64)]
    assert torch.autograd.gradcheck(case.differentiated, inputs, fast_mode=False)


def test_softmax_router_gradient_at_top_1_is_not_zero() -> None:
    logits = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    weights, _ = ops.route(logits, top_k=1)
    assert torch.autograd.grad(weights.sum(), logits)[0].abs().min() > 0


def test_choice_and_logsumexp_of_attention_carry_no_gradient() -> None:
    logits = torch.randn(4, 3, requires_grad=True)
    assert not ops.route(logits, top_k=2)[1].requires_grad
    q = torch.randn(1, 4, 2, 8, requires_grad=True)
    out, lse = ops.attention(q, q, q, scale=1.0)
    assert out.requires_grad
    assert not lse.requires_grad


@pytest.mark.parametrize(
    "case",
    [c for c in CASES if c.differentiable and c.shapes and not c.name.startswith("route")],
    ids=lambda c: c.name,
)
def test_bfloat16_stays_within_its_rounding_of_float64(case: Case) -> None:
    exact_inputs = [t.requires_grad_(t.is_floating_point()) for t in case.inputs(torch.bfloat16)]
    rounded = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in exact_inputs]
    exact_inputs = [t.detach().double().requires_grad_() if t.is_floating_point() else t for t in exact_inputs]
    exact, got = case.differentiated(*exact_inputs), case.differentiated(*rounded)
    seeds = [torch.ones_like(e) for e in exact]
    want_grads = torch.autograd.grad(exact, [t for t in exact_inputs if t.requires_grad], seeds)
    got_grads = torch.autograd.grad(got, [t for t in rounded if t.requires_grad], [torch.ones_like(g) for g in got])
    for want, have in zip((*exact, *want_grads), (*got, *got_grads), strict=True):
        bound = 2**-8 * 4 * max(1.0, float(want.detach().abs().max()))  # a few roundings of 8 significant bits
        assert float((want - have).detach().abs().max()) <= bound
