"""Everything of a model that training changes: masters and their copies, moments, selection biases.

Contract: `commit` is the only place where any of it changes. The masters (float32, or float64 when the model computes
in float64) are the one authority. With replicas each rank keeps the masters and moments of its shard, and what the
graphs read is gathered from all shards after each step, rounded to the dtype the graphs read; on a rank alone it is the
master itself where the dtypes agree, else a copy. Replicas are bitwise equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moegraph._torch_compat import all_gather
from moegraph.graph.placement import num_stages, rank_of_stage
from moegraph.graph.program import Parameter, Program
from moegraph.runtime.families import Family, Piece, pieces, plan_families
from moegraph.runtime.flat import FlatTensors
from moegraph.runtime.gradient_norm import clip_factor
from moegraph.runtime.gradients import GradientBuffers, Tied
from moegraph.runtime.initialise import initial_value
from moegraph.runtime.mesh import SINGLE, Mesh
from moegraph.runtime.optimizer import AdamW
from moegraph.runtime.router_metrics import updated_bias
from moegraph.specs.schema import Spec


def master_dtype(spec: Spec) -> torch.dtype:
    """The dtype of masters, moments and gradients."""
    return torch.float64 if spec.precision.compute == "fp64" else torch.float32


class ModelState:
    """The state of a run at its start, on one rank: `names` are the parameters and buffers that its stages read
    (default all). `values` maps each of them to the tensor its graphs read."""

    def __init__(
        self,
        spec: Spec,
        program: Program,
        device: torch.device,
        mesh: Mesh = SINGLE,
        names: Sequence[str] | None = None,
    ) -> None:
        self.spec, self.mesh, self.device = spec, mesh, device
        own = [program.parameters[name] for name in names] if names is not None else list(program.parameters.values())
        self.tied = _tied(program, mesh, names)
        borrowed = self.tied.name if self.tied is not None and not self.tied.owned else None
        owned = [p for p in own if p.trained and p.name != borrowed]
        dtype = master_dtype(spec)
        self.families = plan_families(owned, mesh)
        self._read: dict[str, FlatTensors] = {}  # of each family with replicas: what the graphs read
        self.values: dict[str, Tensor] = {}
        self._copies: dict[str, Tensor] = {}
        masters: dict[str, Tensor] = {}
        for family in self.families:
            whole = family.buffer(dtype, device)
            for parameter in family.parameters:
                whole[parameter.name].copy_(self._initial(parameter, dtype))
            for piece in pieces(family, whole):
                flat = whole[piece.name]
                masters[piece.name] = flat if family.ranks == 1 else flat.reshape(-1)[piece.start : piece.stop].clone()
            if family.ranks > 1:
                read = family.buffer(family.dtype, device)
                read.flat.copy_(whole.flat)
                self._read[family.name] = read
                self.values.update(read)
        self.optimizer = AdamW(program.parameters, masters, spec.train.optimizer)
        for family in self.families:
            for parameter in family.parameters if family.ranks == 1 else ():
                master = self.optimizer.masters[parameter.name]
                self.values[parameter.name] = master
                if family.dtype != dtype:
                    self.values[parameter.name] = self._copies[parameter.name] = master.to(family.dtype, copy=True)
        self._biases: dict[str, int] = {}  # name → which MoE layer of the model
        biases = [p.name for p in program.parameters.values() if p.role == "select_bias"]
        for parameter in own:
            if parameter.name not in self.values:
                self.values[parameter.name] = self._initial(parameter, dtype).to(device, parameter.dtype)
            if parameter.role == "select_bias":
                self._biases[parameter.name] = biases.index(parameter.name)
        self._pieces = {piece.name: piece for family in self.families for piece in pieces(family, _layout(family))}

    def piece(self, name: str) -> Piece | None:
        """What of a parameter lies in this rank's shard."""
        return self._pieces.get(name)

    def _initial(self, parameter: Parameter, dtype: torch.dtype) -> Tensor:
        experts = None
        if parameter.shards > 1:
            experts = self.mesh.local_experts(parameter.global_shape[0])
        return initial_value(parameter, self.spec.train.seed, dtype, experts)

    @torch.no_grad()
    def commit(self, gradients: GradientBuffers, norm: float, lr: float, expert_counts: Tensor | None) -> None:
        """One step: clips the reduced gradients, which have this finite global norm, and moves parameters, moments and
        biases.

        expert_counts [MoE layers of the model, E] int64 on the device: the choices that fell on each expert in the
        whole step, over unmasked tokens of all ranks.
        """
        factor = clip_factor(norm, self.spec.train.clip_norm)
        self.optimizer.begin_step()
        gathering = []
        for family in self.families:  # while one family's weights are sent round, the next one's are computed
            names = [p.name for p in family.parameters if p.name in self.optimizer.masters]
            mine, copies = self._targets(family)
            self.optimizer.update(names, gradients.shard, lr, factor, copies)
            if mine is not None:
                gathering.append((self._gather(family, mine), mine))
        for work, _ in gathering:
            work.wait()
        self._send_tied()
        if self._biases:
            assert self.spec.model.moe is not None
            assert expert_counts is not None
            rate = self.spec.model.moe.router.bias_update_rate
            for name, layer in self._biases.items():
                self.values[name].copy_(updated_bias(self.values[name], expert_counts[layer], rate))

    @torch.no_grad()
    def refresh(self) -> None:
        """Writes the masters into what the graphs read, on all ranks. Collective."""
        for family in self.families:
            mine, copies = self._targets(family)
            self.optimizer.write_compute_copies(copies)
            if mine is not None:
                self._gather(family, mine).wait()
        self._send_tied()

    def _targets(self, family: Family) -> tuple[Tensor | None, dict[str, Tensor]]:
        """(this rank's shard of what the graphs read, to be sent round, if there are replicas; where each new master
        goes, rounded)."""
        if family.ranks == 1:
            names = (p.name for p in family.parameters)
            return None, {name: self._copies[name] for name in names if name in self._copies}
        size = self._read[family.name].flat.numel() // family.ranks
        mine = torch.zeros(size, dtype=family.dtype, device=self.device)
        found = pieces(family, self._read[family.name])
        return mine, {piece.name: mine[piece.place :][: piece.stop - piece.start] for piece in found}

    def _gather(self, family: Family, mine: Tensor) -> Any:
        """Starts to gather the values of a family from the shards of all its replicas."""
        assert family.group is not None
        return all_gather(self._read[family.name].flat, mine, family.group)

    def _send_tied(self) -> None:
        """The new value of a tied embedding, from the first stage to the last."""
        if self.tied is not None:
            source = dist.get_global_rank(self.tied.group, 0)
            dist.broadcast(self.values[self.tied.name], src=source, group=self.tied.group)

    @property
    def bias_names(self) -> tuple[str, ...]:
        """Names of the selection biases of this rank's blocks."""
        return tuple(self._biases)

    def weights(self) -> dict[str, Tensor]:
        """What a trained model is on one rank alone: every master and every selection bias by name."""
        return {**self.optimizer.masters, **{name: self.values[name] for name in self._biases}}


def _layout(family: Family) -> FlatTensors:
    return family.buffer(family.dtype, torch.device("meta"))


def _tied(program: Program, mesh: Mesh, names: Sequence[str] | None) -> Tied | None:
    """The tied embedding, on the ranks that have to do with it, where first and last stage are two ranks."""
    layout, group = program.spec.layout, mesh.groups.get("tie")
    if group is None or not program.spec.model.tie_embeddings:
        return None
    last = rank_of_stage(layout, num_stages(layout) - 1)
    if last == rank_of_stage(layout, 0) or mesh.pp_rank not in (0, last):
        return None
    (name,) = (p.name for p in program.parameters.values() if p.role == "embedding" and p.trained)
    return Tied(name, mesh.pp_rank == 0, group) if names is None or name in names else None
