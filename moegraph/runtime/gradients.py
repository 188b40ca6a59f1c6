"""Gradient buffers: flat tensors in the optimizer's precision, a view per parameter.

The first gradient of a step is written, later ones (further micro-batches, the second use of a tied weight) are added,
in order. A parameter that got no gradient in a step has a gradient of zero. They are summed over replicas once per
step: each rank then holds the sum of its shard, and `shard` maps parameter names to the pieces in it. A bucket's
reduction starts as soon as its last gradient has arrived, while the backward of other blocks goes on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moegraph._torch_compat import reduce_scatter
from moegraph.graph.program import Parameter
from moegraph.runtime.families import Family, pieces, plan_families
from moegraph.runtime.flat import FlatTensors
from moegraph.runtime.mesh import SINGLE, Mesh


@dataclass(frozen=True)
class Tied:
    """A parameter that the first stage owns and the last one, on another rank, reads too: their gradients are summed
    over `group`. `owned` on the rank that owns it."""

    name: str
    owned: bool
    group: dist.ProcessGroup


class GradientBuffers(Mapping[str, Tensor]):
    """Maps parameter names to their gradients of the current step, in the dtype of the masters."""

    def __init__(
        self,
        parameters: Iterable[Parameter],
        dtype: torch.dtype,
        device: torch.device,
        mesh: Mesh = SINGLE,
        tied: Tied | None = None,
    ) -> None:
        self.dtype, self._tied = dtype, tied
        known = list(parameters)
        self.families = plan_families([p for p in known if tied is None or tied.owned or p.name != tied.name], mesh)
        self._buffers = [family.buffer(dtype, device) for family in self.families]
        self._views = {name: view for buffer in self._buffers for name, view in buffer.items()}
        self._shards = [_shard(family, buffer) for family, buffer in zip(self.families, self._buffers, strict=True)]
        self.shard: dict[str, Tensor] = {}
        for family, buffer, shard in zip(self.families, self._buffers, self._shards, strict=True):
            for piece in pieces(family, buffer):
                flat = shard[piece.place :][: piece.stop - piece.start]
                self.shard[piece.name] = flat if family.group is not None else buffer[piece.name]
        self._family_of = {p.name: i for i, family in enumerate(self.families) for p in family.parameters}
        if tied is not None and not tied.owned:
            (shape,) = (p.shape for p in known if p.name == tied.name)
            self._views[tied.name] = torch.zeros(shape, dtype=dtype, device=device)
        self._written: set[str] = set()
        self._keep = tuple(torch.tensor([keep], dtype=torch.int32) for keep in (0, 1))
        self._missing: list[int] = []  # gradients that each family still waits for
        self._works: dict[int, Any] = {}

    def __getitem__(self, name: str) -> Tensor:
        return self._views[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)

    def begin(self, expected: Mapping[str, int] | None = None) -> None:
        """Starts a step: whatever the buffers hold is overwritten by the first gradient of each parameter.

        `expected`: how many gradients each parameter will get; without it, reductions start at `finish`.
        """
        self._written.clear()
        self._works.clear()
        self._missing = [0] * len(self.families)
        for name, index in self._family_of.items():
            waits = self._tied is not None and name == self._tied.name  # for the gradient of the other rank
            self._missing[index] += 1 << 40 if expected is None or waits else expected.get(name, 0)

    def add(self, name: str, gradient: Tensor) -> None:
        """Writes or adds one gradient."""
        if name in self._written:
            self[name].add_(gradient)
        else:
            self[name].copy_(gradient)
        self.added(name)

    def keep(self, name: str) -> Tensor:
        """[1] int32 on the host: 1 if the buffer holds gradients of this step, to which the next is added, else 0."""
        return self._keep[name in self._written]

    def added(self, name: str) -> None:
        """Says that a gradient has been written to its buffer, or added there."""
        self._written.add(name)
        index = self._family_of.get(name)
        if index is not None and self._missing:
            self._missing[index] -= 1
            if self._missing[index] == 0:
                self._start(index)

    def finish(self) -> None:
        """Ends a step: a parameter that got no gradient has one of zero, not the one of an earlier step; what is not
        being reduced yet is, and everything is waited for."""
        for name in self.keys() - self._written:
            self[name].zero_()
        if self._tied is not None:
            dist.all_reduce(self[self._tied.name], group=self._tied.group)
        for index in range(len(self.families)):
            if index not in self._works:
                self._start(index)
        for work in self._works.values():
            if work is not None:
                work.wait()

    def _start(self, index: int) -> None:
        """Starts to sum a family's gradients over its replicas into this rank's shard."""
        family = self.families[index]
        self._works[index] = None
        if family.group is not None:
            whole = self._buffers[index].flat
            self._works[index] = reduce_scatter(self._shards[index], whole, family.group, async_op=True)

    @property
    def flat(self) -> Tensor:
        """All gradients before the reduction, one after the other: a copy [N]."""
        return torch.cat([buffer.flat for buffer in self._buffers])


def _shard(family: Family, buffer: FlatTensors) -> Tensor:
    """Where the reduced gradients of this rank go; with one replica, the gradients themselves."""
    if family.group is None:
        return buffer.flat
    return buffer.flat.new_zeros(buffer.flat.numel() // family.ranks)
