"""The global gradient norm and clipping by it (arXiv 1211.5063).

norm = sqrt(Σ over parameters ‖gradient‖²), each parameter once, wherever its parts lie: parts of one parameter, or the
parameters of several ranks, are joined by adding their `sum_of_squares`, never by averaging norms. Parameters are taken
in the order of their names, so the result does not depend on the order of the mapping. A tensor's own norm is taken in
its dtype (the optimizer's precision: float32 or float64), the sum over tensors in float64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor


@torch.no_grad()
def sum_of_squares(gradients: Mapping[str, Tensor]) -> Tensor:
    """Σ‖g‖² as a 0-d float64 tensor on the gradients' device. An infinite or NaN gradient makes it so too."""
    if not gradients:
        return torch.zeros((), dtype=torch.float64)
    norms = [torch.linalg.vector_norm(gradients[name]) for name in sorted(gradients)]
    return torch.stack(norms).to(torch.float64).square().sum()


def global_norm(gradients: Mapping[str, Tensor]) -> Tensor:
    """sqrt(Σ‖g‖²), 0-d float64 on the gradients' device; nothing waits for the device."""
    return sum_of_squares(gradients).sqrt()


def clip_factor(norm: float, max_norm: float | None) -> float:
    """What gradients of this finite norm are multiplied by to have at most `max_norm`: exactly 1.0 within it."""
    return 1.0 if max_norm is None or norm <= max_norm else max_norm / norm


def is_finite(norm: Tensor | float) -> bool:
    """Whether no gradient is infinite or NaN. Reads the norm on the host."""
    return math.isfinite(float(norm))
