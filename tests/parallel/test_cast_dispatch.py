"""Training whose rows travel in MXFP8, over gloo: every number, gradient and weight, to the last bit, is that of ranks
that quantise where rows are made and send bf16."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moegraph.passes import registry
from moegraph.specs import Spec
from tests.emulated_dispatch import NAME, EmulatedDispatch
from tests.parallel.steps import Outcome, layout_spec, run_steps
from tests.parallel.test_direct import equal
from tests.passes.user_passes import restored_registry
from tests.ranks import RankPool

WIDE = ("model.d_model=32", "model.moe.d_ff=32", "model.num_layers=2", "model.dense=null", "precision.compute=bf16")
ON, MX, FUSED = "precision.mxfp8.dispatch='on'", "precision.mxfp8.experts='on'", "passes.fuse-experts.enabled=true"
FULL, CHUNKS = "passes.recompute.policy=full", "passes.overlap-communication={mode: on, chunks: 2}"
ONE_RANK = {"moe.router.bias": torch.tensor([60.0, 50.0, 0.0, 0.0])}  # all rows go to the experts of the first rank
BIASED = "model.moe.router.gate_bias=true"

PADDED: dict[str, Any] = {"dp": 2, "ep": 2, "transport": "padded", "capacity": 2.0}
DIRECT: dict[str, Any] = {**PADDED, "transport": "direct"}
PIPELINE = {"pp": 2, "microbatches": 4}
FOUR = {"dp": 4, "ep": 4, "capacity": 4.0}
CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "direct, a rank without rows": (DIRECT, (FUSED, MX, BIASED)),
    "padded": (PADDED, ()),
    "padded, a pipeline": ({**PADDED, **PIPELINE}, (FULL,)),
    "padded, a rank without rows": (PADDED, (FUSED, BIASED)),
    "padded, four ranks": ({**PADDED, **FOUR, "microbatches": 2}, (MX, FULL)),
    "padded, chunks": (PADDED, (CHUNKS,)),
    "padded, dropped": ({**PADDED, "capacity": 1.0, "overflow": "drop"}, ()),
    "direct": (DIRECT, ()),
    "direct, four ranks": ({**DIRECT, **FOUR}, (FUSED, FULL)),
    "direct, a pipeline": ({**DIRECT, **PIPELINE}, (FUSED, MX, FULL)),
    "exact": ({"dp": 2, "ep": 2, "transport": "exact"}, ()),
    "compiled": (PADDED, (FUSED, MX, "train.compile=inductor")),
}
EVERY_DAY = list(CASES)[:1]


def run_emulated(rank: int, spec: Spec, *arguments: Any) -> Outcome:
    """`run_steps` with the reference's pass."""
    with restored_registry():
        registry.register(EmulatedDispatch)
        return run_steps(rank, spec, *arguments)


@pytest.mark.parametrize("case", [pytest.param(c, marks=() if c in EVERY_DAY else pytest.mark.slow) for c in CASES])
def test_steps_are_bitwise_those_of_rows_quantised_before_they_travel_in_bf16(ranks: RankPool, case: str) -> None:
    layout, options = CASES[case]
    world = layout["dp"] * layout.get("pp", 1)
    arguments = (1 if case in EVERY_DAY else 2, 0, 4.0, ONE_RANK if BIASED in options else None)
    found = ranks.run(world, run_steps, layout_spec(*WIDE, *options, ON, **layout), *arguments)[0]
    custom = f"passes.custom.{NAME}={{enabled: true}}"
    expected = ranks.run(world, run_emulated, layout_spec(*WIDE, *options, custom, **layout), *arguments)[0]
    equal(found, expected)
    assert any(bool(gradient.any()) for gradient in found.gradients[0].values())
    if BIASED in options:
        up = found.gradients[0]["layers.1.moe.w_up"]
        assert up[:2].any()
        assert not up[2:].any()


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["padded", "direct"])
def test_a_step_that_overflows_is_computed_again_with_more_room(ranks: RankPool, transport: str) -> None:
    layout: dict[str, Any] = {"dp": 2, "ep": 2, "transport": transport}
    small = ranks.run(2, run_steps, layout_spec(*WIDE, ON, **layout, capacity=1.0), 1)[0]
    large = ranks.run(2, run_steps, layout_spec(*WIDE, ON, **layout, capacity=2.0), 1)[0]
    assert small.replays == 1
    assert small.capacity == 2.0
    equal(small, large)
