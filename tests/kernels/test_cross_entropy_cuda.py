"""Cross entropy on a GPU: against float64, at a large vocabulary, at memory speed, without a host synchronisation."""

from __future__ import annotations

import pytest
import torch

from moegraph import ops
from moegraph.benchmarks.timing import make_ceilings, time_in_turn
from tests.kernels.cases import relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [96, 50257, 100352])
def test_losses_and_gradients_equal_float64(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = (4 * torch.randn(300, width, device="cuda")).to(dtype).requires_grad_()
    labels = torch.randint(0, width, (300,), device="cuda")
    labels[7] = -100
    wide = logits.detach().double().requires_grad_()
    want, want_lse = torch.nn.functional.cross_entropy(wide, labels, reduction="none"), wide.logsumexp(1)
    loss, lse = ops.cross_entropy(logits, labels)
    assert relative_error(loss, want) < 1e-6
    assert relative_error(lse, want_lse) < 1e-6
    (found,) = torch.autograd.grad(loss.mean() + (lse**2).mean(), logits)
    (expected,) = torch.autograd.grad(want.mean() + (want_lse**2).mean(), wide)
    assert relative_error(found, expected) < (4e-3 if dtype == torch.bfloat16 else 1e-6)
    assert found.dtype == dtype


def test_it_moves_memory_at_three_quarters_of_a_copys_speed() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    logits = torch.randn(8192, 100352, device=device, dtype=torch.bfloat16)
    labels = torch.randint(0, 100352, (8192,), device=device)
    loss, lse = ops.cross_entropy(logits, labels)
    ceilings = make_ceilings(device, torch.bfloat16)
    backward = torch.ops.moegraph.cross_entropy_backward.default
    jobs = {
        "copy": ceilings.copy,
        "forward": lambda _: ops.cross_entropy(logits, labels),
        "backward": lambda _: backward(loss, None, logits, labels, lse),
    }
    times = {name: min(found) for name, found in time_in_turn(jobs, device, repeats=5).items()}
    rate = ceilings.copied_bytes / times["copy"]
    assert logits.nbytes / times["forward"] > 0.75 * rate, times
    assert 2 * logits.nbytes / times["backward"] > 0.75 * rate, times


def test_nothing_waits_for_the_device() -> None:
    logits = torch.randn(64, 1000, device="cuda", requires_grad=True)
    labels = torch.randint(0, 1000, (64,), device="cuda")
    ops.cross_entropy(logits, labels)[0].sum().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        ops.cross_entropy(logits, labels)[0].sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
