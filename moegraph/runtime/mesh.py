"""The ranks of a run and their groups.

    rank = pp_rank · dp + dp_rank        dp_rank = edp_rank · ep + ep_rank        world = dp · pp

Ranks that exchange tokens (`ep`) are neighbours, so they share a host where they can. Groups, by the name that graphs
and collectives call them: `dp` (replicas of the dense parameters), `ep` (the ranks that hold one set of experts
together), `edp` (replicas of one shard of experts), `pp` (the stages of one pipeline), `tie` (first and last stage, for
a tied embedding). Expert traffic has a group, and on CUDA a stream, of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from moegraph._torch_compat import forget_process_group, name_process_group
from moegraph.errors import UsageError
from moegraph.runtime.rendezvous import meet
from moegraph.specs.schema import Layout


@dataclass(frozen=True)
class Mesh:
    """One rank's place. `groups` maps an axis to its process group where it has more than one rank."""

    dp: int = 1
    ep: int = 1
    pp: int = 1
    rank: int = 0
    groups: dict[str, dist.ProcessGroup] = field(default_factory=dict)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.dp * self.pp

    @property
    def pp_rank(self) -> int:
        """Place in the pipeline."""
        return self.rank // self.dp

    @property
    def dp_rank(self) -> int:
        """Which share of the batch this rank computes."""
        return self.rank % self.dp

    @property
    def ep_rank(self) -> int:
        """Which shard of the experts this rank holds."""
        return self.dp_rank % self.ep

    @property
    def edp(self) -> int:
        """How many replicas each shard of experts has."""
        return self.dp // self.ep

    def local_experts(self, num_experts: int) -> range:
        """Global indices of the experts on this rank."""
        size = num_experts // self.ep
        return range(self.ep_rank * size, (self.ep_rank + 1) * size)

    def size(self, axis: str) -> int:
        """Ranks of an axis of this mesh."""
        return {"dp": self.dp, "ep": self.ep, "edp": self.edp, "pp": self.pp, "world": self.world}[axis]

    def index(self, axis: str) -> int:
        """This rank's place on an axis."""
        places = {"dp": self.dp_rank, "ep": self.ep_rank, "edp": self.dp_rank // self.ep, "pp": self.pp_rank}
        return places[axis]


SINGLE = Mesh()


def axis_ranks(dp: int, ep: int, pp: int) -> dict[str, list[list[int]]]:
    """The groups of each axis, as lists of ranks; each rank is in one of them."""
    rows = [[stage * dp + d for d in range(dp)] for stage in range(pp)]
    return {
        "dp": rows,
        "ep": [row[i : i + ep] for row in rows for i in range(0, dp, ep)],
        "edp": [row[i::ep] for row in rows for i in range(ep)],
        "pp": [[row[d] for row in rows] for d in range(dp)],
        "tie": [[rows[0][d], rows[-1][d]] for d in range(dp)] if pp > 1 else [],
    }


def check_world(layout: Layout, world: int) -> None:
    """Raises UsageError unless the layout asks for as many ranks as there are processes."""
    if layout.world != world:
        raise UsageError(
            f"layout asks for {layout.world} ranks (dp {layout.dp} × pp {layout.pp}), and {world} "
            f"{'process runs' if world == 1 else 'processes run'}: `moegraph train --nproc {layout.world}` starts them "
            "on this host, torchrun on several"
        )


@contextmanager
def join(layout: Layout, rank: int, world: int, device: torch.device) -> Iterator[Mesh]:
    """This process as one rank of the layout; within, its groups exist and graphs find them by name.

    Process groups are made from MASTER_ADDR and MASTER_PORT, with gloo on the CPU and NCCL on CUDA; a collective that
    takes longer than `layout.timeout` seconds ends the run.
    """
    check_world(layout, world)
    if world == 1:
        yield SINGLE
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if device.type == "cpu" and "GLOO_SOCKET_IFNAME" not in os.environ and _all_on_this_host(world):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    timeout = timedelta(seconds=layout.timeout)
    store = meet(rank, world, timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    named: list[str] = []
    try:
        groups: dict[str, dist.ProcessGroup] = {}
        for axis, every in axis_ranks(layout.dp, layout.ep, layout.pp).items():
            for ranks in every:
                if len(ranks) == 1:
                    continue
                group = dist.new_group(ranks, timeout=timeout)  # every rank makes every group, in one order
                if rank in ranks and group is not None:
                    groups[axis] = group
        for axis, group in groups.items():
            name_process_group(axis, group)
            named.append(axis)
        yield Mesh(layout.dp, layout.ep, layout.pp, rank, groups)
    finally:
        if device.type == "cuda":
            from moegraph.runtime.symmetric import forget_channels

            forget_channels()  # the next run's groups have the same names
        for axis in named:
            forget_process_group(axis)
        dist.destroy_process_group()


def _all_on_this_host(world: int) -> bool:
    return os.environ.get("LOCAL_WORLD_SIZE") == str(world)
