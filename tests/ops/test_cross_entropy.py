"""Chunked cross entropy equals torch's, in any chunk size, with ignored labels."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moegraph import ops
from moegraph.ops import cross_entropy as _function

TOKENS, VOCAB = 300, 2000  # several chunks of 2^18 elements


def logits_and_labels(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    labels = torch.randint(0, VOCAB, (TOKENS,))
    labels[::7] = -100
    return (torch.randn(TOKENS, VOCAB) * 3).to(dtype).requires_grad_(), labels


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-5), (torch.float64, 1e-12)]
)
def test_loss_equals_torch(dtype: torch.dtype, tolerance: float) -> None:
    logits, labels = logits_and_labels(dtype)
    loss, lse = ops.cross_entropy(logits, labels)
    wide = logits.detach().to(torch.promote_types(dtype, torch.float32))
    assert loss.dtype == lse.dtype == wide.dtype
    torch.testing.assert_close(loss, F.cross_entropy(wide, labels, reduction="none"), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse, wide.logsumexp(-1), rtol=tolerance, atol=tolerance)


def test_gradients_of_loss_and_logsumexp_equal_torch() -> None:
    logits, labels = logits_and_labels(torch.float64)
    loss, lse = ops.cross_entropy(logits, labels)
    weights = torch.randn(2, TOKENS, dtype=torch.float64)
    have = torch.autograd.grad((loss * weights[0] + lse * weights[1]).sum(), logits)[0]
    expected_loss = F.cross_entropy(logits, labels, reduction="none")
    want = torch.autograd.grad((expected_loss * weights[0] + logits.logsumexp(-1) * weights[1]).sum(), logits)[0]
    torch.testing.assert_close(have, want, rtol=1e-12, atol=1e-14)


def test_ignored_labels_have_no_loss_and_no_gradient() -> None:
    logits, labels = logits_and_labels()
    loss, _ = ops.cross_entropy(logits, labels)
    grad = torch.autograd.grad(loss.sum(), logits)[0]
    assert loss[::7].eq(0).all()
    assert grad[::7].eq(0).all()
    assert grad[1].ne(0).all()


def test_all_labels_ignored_and_no_tokens_at_all() -> None:
    for tokens in (4, 0):
        logits = torch.randn(tokens, 5, requires_grad=True)
        loss, _ = ops.cross_entropy(logits, torch.full((tokens,), -100))
        assert loss.sum() == 0
        assert torch.autograd.grad(loss.sum(), logits)[0].eq(0).all()


def test_forward_allocates_less_than_a_float32_copy_of_the_logits() -> None:
    logits, labels = logits_and_labels(torch.bfloat16)
    with torch.profiler.profile(profile_memory=True) as profile, torch.no_grad():
        _function(logits, labels)
    largest = max(event.cpu_memory_usage for event in profile.events() if event.cpu_memory_usage)
    assert largest < TOKENS * VOCAB * 4
