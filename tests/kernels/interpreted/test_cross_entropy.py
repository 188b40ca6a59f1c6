"""The cross entropy kernels in Triton's interpreter, against float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from moegraph.kernels import cross_entropy as kernels

WIDTHS = [1, 96, 4096, 9001]  # one block, part of one, a whole one, several


def logits_of(rows: int, width: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(width)
    logits = 4 * torch.randn(rows, width, generator=generator)
    labels = torch.randint(0, width, (rows,), generator=generator)
    labels[1] = -100
    return logits.to(dtype), labels


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("given", ["loss", "lse", "both"])
def test_losses_and_gradients_are_those_of_float64(width: int, dtype: torch.dtype, given: str) -> None:
    logits, labels = logits_of(5, width, dtype)
    wide = logits.double().requires_grad_()
    want = torch.nn.functional.cross_entropy(wide, labels, reduction="none"), wide.logsumexp(1)
    have = kernels.cross_entropy(logits, labels)
    for a, b in zip(have, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-6, atol=1e-6)
    assert have[0][1] == 0
    grads = [torch.randn(5) if given in (name, "both") else None for name in ("loss", "lse")]
    asked = [(out, grad.double()) for out, grad in zip(want, grads, strict=True) if grad is not None]
    (expected,) = torch.autograd.grad([out for out, _ in asked], wide, [grad for _, grad in asked])
    found = kernels.cross_entropy_backward(grads[0], grads[1], logits, labels, have[1])
    assert found.dtype == dtype
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-6}
    torch.testing.assert_close(found.double(), expected, **tolerance)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 1e30, -1e30])
@pytest.mark.parametrize("place", [0, 5000])
def test_what_is_not_ordinary_is_what_torch_says(value: float, place: int) -> None:
    logits, labels = logits_of(3, 6000)
    logits[0, place] = value
    logits[2] = value  # a whole row
    labels[:] = 17
    have = kernels.cross_entropy(logits, labels)
    lse = logits.double().logsumexp(1)
    torch.testing.assert_close(have[1].double(), lse, rtol=1e-6, atol=1e-6, equal_nan=True)
    target = logits[:, 17].double()
    torch.testing.assert_close(have[0].double(), lse - target, rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("label", [-1, 96, 10**12])
def test_a_label_that_does_not_exist_is_not_silent(label: int) -> None:
    logits, labels = logits_of(3, 96)
    labels[0] = label
    loss, lse = kernels.cross_entropy(logits, labels)
    assert loss.isnan().tolist() == [True, False, False]
    found = kernels.cross_entropy_backward(torch.ones(3), None, logits, labels, lse)
    assert found.isnan().any(1).tolist() == [True, False, False]


def test_rows_apart_in_memory_and_no_rows_are_fine() -> None:
    logits, labels = logits_of(4, 100)
    wide = torch.full((4, 160), math.nan)
    wide[:, :100] = logits
    for given in (wide[:, :100], logits.t().contiguous().t()):
        for a, b in zip(kernels.cross_entropy(given, labels), kernels.cross_entropy(logits, labels), strict=True):
            assert torch.equal(a, b)
        lse = kernels.cross_entropy(given, labels)[1]
        ones = torch.ones(4)
        want = kernels.cross_entropy_backward(ones, None, logits, labels, lse)
        assert torch.equal(kernels.cross_entropy_backward(ones, None, given, labels, lse), want)
    assert [t.shape for t in kernels.cross_entropy(logits[:0], labels[:0])] == [(0,), (0,)]
