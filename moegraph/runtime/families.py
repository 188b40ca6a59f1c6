"""Families of parameters: neighbours that are replicated over the same ranks and read in the same dtype share one flat
buffer, up to a size.

Dense parameters are replicated over `dp`, experts over `edp` (dp / ep). Of each family every replica holds one equal
shard: of the gradients after the reduction, of the masters and of the moments. A *piece* is the part of a parameter
that lies in this rank's shard.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from moegraph.graph.program import Parameter
from moegraph.runtime.flat import UNIT, FlatTensors
from moegraph.runtime.mesh import Mesh

BUCKET = 1 << 26  # elements that are reduced at once: 256 MiB of fp32


@dataclass(frozen=True)
class Family:
    """Parameters with one layout. `ranks` replicas hold a shard each, this rank the one of number `index`."""

    name: str
    parameters: tuple[Parameter, ...]
    dtype: torch.dtype  # what the graphs read
    ranks: int
    index: int
    group: dist.ProcessGroup | None

    def buffer(self, dtype: torch.dtype, device: torch.device) -> FlatTensors:
        """Zeros for every parameter of the family, in `dtype`."""
        shapes = {p.name: p.shape for p in self.parameters}
        return FlatTensors(shapes, dtype, device, unit=UNIT, parts=self.ranks)


@dataclass(frozen=True)
class Piece:
    """A part of a parameter: elements `start` to `stop` of it flattened, at `place` of this rank's shard."""

    name: str
    start: int
    stop: int
    place: int


def plan_families(parameters: Iterable[Parameter], mesh: Mesh, largest: int = BUCKET) -> list[Family]:
    """The families of a rank's trained parameters, in the order of the model. With one replica nothing is sent, and a
    family is as large as it likes; otherwise it ends with the parameter that makes it `largest` elements or more."""
    found: dict[tuple[str, torch.dtype], list[list[Parameter]]] = {}
    for parameter in parameters:
        axis = "edp" if parameter.experts and mesh.ep > 1 else "dp"
        buckets = found.setdefault((axis, parameter.dtype), [[]])
        if mesh.size(axis) > 1 and sum(math.prod(p.shape) for p in buckets[-1]) >= largest:
            buckets.append([])
        buckets[-1].append(parameter)
    return [
        Family(
            f"{'experts' if axis == 'edp' else 'dense'}.{str(dtype).removeprefix('torch.')}.{number}",
            tuple(members),
            dtype,
            mesh.size(axis),
            mesh.index(axis),
            mesh.groups.get(axis),
        )
        for (axis, dtype), buckets in found.items()
        for number, members in enumerate(buckets)
    ]


def pieces(family: Family, layout: FlatTensors) -> Sequence[Piece]:
    """The pieces in this rank's shard, in order. With one replica each parameter is a piece."""
    size = layout.flat.numel() // family.ranks
    low = family.index * size
    found = []
    for parameter in family.parameters:
        count, begin = layout[parameter.name].numel(), layout.starts[parameter.name]
        start, stop = max(low - begin, 0), min(low + size - begin, count)
        if start < stop:
            found.append(Piece(parameter.name, start, stop, begin + start - low))
    return found
