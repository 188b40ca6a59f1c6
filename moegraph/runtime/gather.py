"""Whole parameters from the shards of a run, on its first rank."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from moegraph.graph.placement import rank_of_stage
from moegraph.graph.program import Parameter, Program
from moegraph.runtime.mesh import Mesh
from moegraph.runtime.model_state import ModelState, master_dtype


def gather_masters(program: Program, state: ModelState, mesh: Mesh) -> dict[str, Tensor]:
    """Every master and selection bias by name, whole and on the CPU, on rank 0; an empty dict elsewhere.

    Each rank sends the pieces that it alone holds, in the order of the model. Collective over the world.
    """
    stage_of: dict[str, int] = {}
    for instance in program.instances:
        for name in instance.parameters.values():
            stage_of.setdefault(name, instance.stage)
    layout = program.spec.layout
    found: dict[str, Tensor] = {}
    for parameter in program.parameters.values():
        if not parameter.trained and parameter.role != "select_bias":
            continue
        pp_rank = rank_of_stage(layout, stage_of[parameter.name])
        owners = range(pp_rank * mesh.dp, (pp_rank + 1) * mesh.dp)
        if mesh.rank == 0:
            found[parameter.name] = _receive(parameter, owners, state, mesh)
        elif mesh.rank in owners:
            _send(parameter, state, mesh)
    return found


def _own_piece(parameter: Parameter, state: ModelState, mesh: Mesh) -> tuple[int, Tensor]:
    """(where it begins in the whole parameter flattened, the values) of what this rank alone holds; maybe nothing."""
    name = parameter.name
    if parameter.role == "select_bias":
        values = state.values[name].reshape(-1) if mesh.dp_rank == 0 else state.values[name].new_empty(0)
        return 0, values
    place = state.piece(name)
    if place is None:
        return 0, torch.empty(0, dtype=master_dtype(state.spec), device=state.device)
    offset = mesh.ep_rank * math.prod(parameter.shape) if parameter.shards > 1 else 0
    return offset + place.start, state.optimizer.masters[name].reshape(-1)


def _send(parameter: Parameter, state: ModelState, mesh: Mesh) -> None:
    start, values = _own_piece(parameter, state, mesh)
    dist.send(torch.tensor([start, values.numel()], dtype=torch.int64, device=state.device), dst=0)
    if values.numel():
        dist.send(values.contiguous(), dst=0)


def _receive(parameter: Parameter, owners: range, state: ModelState, mesh: Mesh) -> Tensor:
    dtype = parameter.dtype if parameter.role == "select_bias" else master_dtype(state.spec)
    whole = torch.zeros(math.prod(parameter.global_shape), dtype=dtype, device=state.device)
    for owner in owners:
        if owner == mesh.rank:
            start, values = _own_piece(parameter, state, mesh)
        else:
            header = torch.zeros(2, dtype=torch.int64, device=state.device)
            dist.recv(header, src=owner)
            start, count = header.tolist()
            values = whole.new_empty(count)
            if count:
                dist.recv(values, src=owner)
        whole[start : start + values.numel()] = values
    return whole.reshape(parameter.global_shape).cpu()


def gather_bytes(mine: bytes, mesh: Mesh) -> list[bytes]:
    """What every rank has, in their order, on rank 0; nothing elsewhere. Collective over the world."""
    if mesh.world == 1:
        return [mine]
    sizes = [torch.zeros((), dtype=torch.int64) for _ in range(mesh.world)]
    dist.all_gather(sizes, torch.tensor(len(mine), dtype=torch.int64))
    content = torch.zeros(max(int(size) for size in sizes), dtype=torch.uint8)
    content[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    every = [torch.empty_like(content) for _ in range(mesh.world)] if mesh.rank == 0 else None
    dist.gather(content, every, dst=0)
    return [each.numpy()[: int(size)].tobytes() for each, size in zip(every or [], sizes, strict=False)]
