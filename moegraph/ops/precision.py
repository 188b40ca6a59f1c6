"""Which dtype an operator computes in: float32, or float64 when its input is float64."""

from __future__ import annotations

import torch


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, float32 for every other floating dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32
