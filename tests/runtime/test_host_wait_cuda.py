"""On a GPU the host waits for the device once in a step: when it reads the step's numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from moegraph.runtime.engine import Engine
from moegraph.runtime.mesh import join
from tests.ranks import RankPool
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


@pytest.fixture(scope="module")
def pair() -> Iterator[RankPool]:
    pool = RankPool(2)
    yield pool
    pool.close()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    "layout",
    [
        "{dp: 2, ep: 2, transport: padded, capacity: 2, microbatches: 2}",
        "{dp: 2, ep: 2, transport: direct, capacity: 2, microbatches: 2}",
        "{pp: 2, microbatches: 2, schedule: 1f1b}",
    ],
)
def test_two_gpus_never_wait_either_and_learn_the_same_as_one(pair: RankPool, layout: str) -> None:
    (expected,) = pair.run(1, steps_without_wait, "{microbatches: 2}")
    found = pair.run(2, steps_without_wait, layout)
    assert found[0] == found[1]
    assert found[0] == pytest.approx(expected, rel=2e-3)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("transport", ["padded", "direct"])
def test_rows_that_travel_in_mxfp8_never_wait_either_and_teach_nearly_the_same(pair: RankPool, transport: str) -> None:
    layout = f"{{dp: 2, ep: 2, transport: {transport}, capacity: 2, microbatches: 2}}"
    expected = pair.run(2, steps_without_wait, layout)[0]
    found = pair.run(2, steps_without_wait, layout, "precision.mxfp8.dispatch='on'")
    assert found[0] == found[1]
    assert found[0] != expected
    assert found[0] == pytest.approx(expected, rel=1e-2)


def steps_without_wait(rank: int, layout: str, *options: str) -> list[float]:
    """The losses of four steps; no part of the last three but the agreement waits for the device."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    overrides = ("precision.compute=bf16", "passes.fuse-experts.enabled=true", f"layout={layout}", *options)
    spec = small_spec(*overrides)
    losses = []
    with join(spec.layout, rank, spec.layout.world, device) as mesh:
        engine = Engine(spec, device, mesh)
        for step in range(4):
            batch = random_batch(spec, seed=step)
            if step == 0:
                agreed = engine.compute(batch)
                engine.commit(agreed, 1e-3)
            else:
                with no_wait():
                    computed = engine.computer.compute(batch)
                agreed = engine.agree(computed)
                with no_wait():
                    engine.commit(agreed, 1e-3)
            losses.append(agreed.loss)
        torch.cuda.synchronize()
    return losses
