"""Gradient buffers: one flat tensor in the optimizer's precision, a view per parameter.

The first gradient of a step is written, later ones (further micro-batches, the second use of a tied weight) are added,
in order. A parameter that got no gradient in a step has a gradient of zero.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from moegraph.graph.program import Parameter
from moegraph.runtime.flat import FlatTensors


class GradientBuffers(FlatTensors):
    """Maps parameter names to their gradients of the current step, in the dtype of the masters."""

    def __init__(self, parameters: Iterable[Parameter], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__({parameter.name: parameter.shape for parameter in parameters}, dtype, device)
        self._written: set[str] = set()

    def begin(self) -> None:
        """Starts a step: whatever the buffers hold is overwritten by the first gradient of each parameter."""
        self._written.clear()

    def add(self, name: str, gradient: Tensor) -> None:
        """Writes or adds one gradient."""
        if name in self._written:
            self[name].add_(gradient)
        else:
            self[name].copy_(gradient)
            self._written.add(name)

    def finish(self) -> None:
        """Ends a step: a parameter that got no gradient has one of zero, not the one of an earlier step."""
        for name in self.keys() - self._written:
            self[name].zero_()
