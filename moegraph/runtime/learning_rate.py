"""Learning-rate schedules, as a function of the step alone.

Steps count from 1 to `steps`. Warm-up is linear and reaches lr at step `warmup`; its first step is not zero.

    cosine    from lr at the end of warm-up (or step 1) down half a cosine to final · lr at the last step
    wsd       lr until step steps - decay, then linearly down to final · lr at the last step (arXiv 2404.06395)
    constant  lr
"""

from __future__ import annotations

import math

from moegraph.specs.schema import Constant, Cosine, Wsd


def learning_rate(step: int, steps: int, schedule: Cosine | Wsd | Constant, lr: float) -> float:
    """The learning rate of one step, 1 ≤ step ≤ steps. Raises ValueError outside. Where a decay of `wsd` would begin
    before warm-up has ended, warm-up comes first and the decay joins at its own value."""
    if not 1 <= step <= steps:
        raise ValueError(f"step {step} is not within 1 to {steps}")
    if step < schedule.warmup:
        return lr * step / schedule.warmup
    if isinstance(schedule, Constant):
        return lr
    if isinstance(schedule, Wsd):
        done = (step - (steps - schedule.decay)) / schedule.decay if schedule.decay else 0.0
        left = 1.0 - max(done, 0.0)
    else:
        start = max(schedule.warmup, 1)
        done = (step - start) / (steps - start) if steps > start else 0.0
        left = 0.5 * (1.0 + math.cos(math.pi * done))
    return lr * (left + schedule.final * (1.0 - left))
