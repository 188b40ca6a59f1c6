"""On a GPU the host waits for the device once in a step: when it reads the step's numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from moegraph.runtime.engine import Engine
from tests.small_models import random_batch, small_spec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@contextmanager
def no_wait() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.mark.parametrize("fused", ["true", "false"])
@pytest.mark.parametrize("mode", ["eager", "inductor"])
def test_forward_backward_and_optimizer_never_wait(fused: str, mode: str) -> None:
    spec = small_spec(
        "precision.compute=bf16",
        "model.moe.router.select_bias=learned_free",
        "layout.microbatches=2",
        f"passes.fuse-experts.enabled={fused}",
        f"train.compile={mode}",
    )
    device = torch.device("cuda", torch.cuda.current_device())
    engine = Engine(spec, device)
    for step in range(3):
        batch = random_batch(spec)
        if step == 0:  # compiles, and allocates what a step needs
            engine.commit(engine.compute(batch), 1e-3)
            continue
        with no_wait():
            computed = engine.computer.compute(batch)
        agreed = engine.agree(computed)
        with no_wait():
            engine.commit(agreed, 1e-3)
    with pytest.raises(RuntimeError), no_wait():
        torch.zeros(1, device=device).item()
