"""Replicas that have silently come apart: a bit that flipped in one rank's memory, a kernel that is not deterministic.

What the graphs read of each parameter and selection bias is reduced to one 64-bit checksum per tensor, on its device,
and the checksums are compared over the ranks that hold the same tensor. Replicas are bitwise equal by contract, so one
bit of difference is a fault.

checksum = Σ bits[i] · (2·i + 1)·C  modulo 2^64, C odd, over words of at most 32 bits: one word that changes always
changes the sum, and so do two that change places.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from moegraph.errors import CheckFailed
from moegraph.runtime.collectives import during
from moegraph.runtime.mesh import Mesh
from moegraph.runtime.model_state import ModelState

_BITS = {
    1: torch.int8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int32,
}  # halves, so that two sign bits of float64 do not cancel out
_ODD = -7046029254386353131  # 0x9E3779B97F4A7C15, the golden ratio of 2^64
_CHUNK = 1 << 22  # elements at a time, so that the int64 copies stay small


def checksum(value: Tensor) -> Tensor:
    """Of a tensor's bits: 0-d int64 on its device."""
    bits = value.detach().contiguous().reshape(-1).view(_BITS[value.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=value.device)
    for start in range(0, bits.numel(), _CHUNK):
        part = bits[start : start + _CHUNK].to(torch.int64)
        places = torch.arange(start, start + part.numel(), dtype=torch.int64, device=value.device)
        total += (part * ((2 * places + 1) * _ODD)).sum()
    return total


def check_replicas(state: ModelState, mesh: Mesh, step: int) -> None:
    """Raises CheckFailed, on every rank, if replicas differ; a rank whose replicas do names parameter and ranks.
    Collective."""
    found: list[str] = []
    with during("comparing replicas"):
        for group, values in _replicated(state, mesh):
            found += _differences(values, group)
        bad = torch.zeros(mesh.world, dtype=torch.int64, device=state.device)
        bad[mesh.rank] = bool(found)
        if mesh.world > 1:
            dist.all_reduce(bad)
    if found:
        more = f", and {len(found) - 1} more" if len(found) > 1 else ""
        raise CheckFailed(f"step {step}: replicas have come apart: {found[0]}{more}; {_ADVICE}")
    if bad.any():
        ranks = ", ".join(map(str, bad.nonzero().flatten().tolist()))
        raise CheckFailed(f"step {step}: replicas have come apart on ranks {ranks}, which name the parameter")


_ADVICE = "go on from a checkpoint before it, and look at the memory of that device"


def _replicated(state: ModelState, mesh: Mesh) -> Iterator[tuple[dist.ProcessGroup, dict[str, Tensor]]]:
    for family in state.families:
        if family.group is not None:
            names = [parameter.name for parameter in family.parameters]
            yield family.group, {name: state.values[name] for name in names}
    group = mesh.groups.get("dp")
    if group is not None and state.bias_names:
        yield group, {name: state.values[name] for name in state.bias_names}


def _differences(values: Mapping[str, Tensor], group: dist.ProcessGroup) -> list[str]:
    """One clause per tensor that is not the same on all ranks of the group. The ranks that differ are those that do not
    have what most have, or what the first has."""
    mine = torch.stack([checksum(value) for value in values.values()])
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, mine, group=group)
    rows = [row.tolist() for row in every]
    clauses = []
    for name, column in zip(values, zip(*rows, strict=True), strict=True):
        usual, _ = Counter(column).most_common(1)[0]
        ranks = [dist.get_global_rank(group, place) for place, sum_ in enumerate(column) if sum_ != usual]
        if ranks:
            of = f"{len(column)} replicas"
            clauses.append(f"{name} on rank {', '.join(map(str, ranks))} is not that of the others of its {of}")
    return clauses
