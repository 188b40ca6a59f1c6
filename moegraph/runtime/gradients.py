"""Gradient buffers: one flat tensor in the optimizer's precision, a view per parameter.

The first gradient of a step is written, later ones (further micro-batches, the second use of a tied weight) are added,
in order. Views start at multiples of 256 bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from moegraph.graph.program import Parameter

_ALIGNMENT_BYTES = 256


class GradientBuffers(Mapping[str, Tensor]):
    """Maps parameter names to their gradients of the current step, in the dtype of the masters."""

    def __init__(self, parameters: Iterable[Parameter], dtype: torch.dtype, device: torch.device) -> None:
        step = _ALIGNMENT_BYTES // torch.empty((), dtype=dtype).element_size()
        starts, size = {}, 0
        parameters = list(parameters)
        for parameter in parameters:
            starts[parameter.name] = size
            size += -(-parameter.numel // step) * step
        self.flat = torch.zeros(size, dtype=dtype, device=device)
        self._views = {p.name: self.flat[starts[p.name] :][: p.numel].view(p.shape) for p in parameters}
        self._written: set[str] = set()

    def begin(self) -> None:
        """Starts a step: whatever the buffers hold is overwritten by the first gradient of each parameter."""
        self._written.clear()

    def add(self, name: str, gradient: Tensor) -> None:
        """Writes or adds one gradient."""
        if name in self._written:
            self._views[name].add_(gradient)
        else:
            self._views[name].copy_(gradient)
            self._written.add(name)

    def __getitem__(self, name: str) -> Tensor:
        return self._views[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)
