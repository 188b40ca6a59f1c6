"""The agree phase of a step: the ranks add their numbers up, in one reduction over the world that the host reads once.

Nothing has been changed when it runs. Every rank gets the same numbers and so decides the same: to compute the step
again, to stop, or to commit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from moegraph.runtime.computed import LOST, ROUTING, Computed
from moegraph.runtime.mesh import Mesh

_SCALARS = ("loss", "balance", "z", "sum_of_squares", "save", "stop")


@dataclass
class Agreed:
    """A step's numbers over all ranks, on the host.

    `overflow` counts rows that found no place: above 0 the others mean nothing. Per MoE layer of the model, in order:
    expert_counts [L][E], probability_sum [L][E], router_entropy [L] (a mean over tokens), dropped [L]. `save`
    and `stop`: whether any rank was asked for a checkpoint, or to end after this step.
    """

    loss: float
    balance: float
    z: float
    norm: float
    overflow: int
    expert_counts: list[list[int]]
    probability_sum: list[list[float]]
    router_entropy: list[float]
    dropped: list[int]
    save: bool = False
    stop: bool = False
    counts_on_device: Tensor | None = None  # expert_counts again, [L, E] int64, so that no one copies them back

    def numbers(self) -> dict[str, float]:
        """The step's losses and its gradient norm, as they stand in a record."""
        total = self.loss + self.balance + self.z
        losses = {"loss": self.loss, "loss_total": total, "balance_loss": self.balance, "z_loss": self.z}
        return {**losses, "grad_norm": self.norm}


def agree(
    computed: Computed,
    sum_of_squares: Tensor,
    moe_blocks: Sequence[int],
    num_experts: int,
    mesh: Mesh,
    requests: tuple[bool, bool] = (False, False),
) -> Agreed:
    """The sums over all ranks. `sum_of_squares` 0-d: of the gradients in this rank's shards; `moe_blocks`: places in
    the model of the blocks that route; `requests`: (save, stop), as this rank was asked by a signal."""
    device = sum_of_squares.device
    layers = len(moe_blocks)
    widths = {"expert_counts": num_experts, "probability_sum": num_experts}
    parts = [torch.stack([t.double() for t in (computed.loss, computed.balance, computed.z, sum_of_squares)])]
    parts += [torch.full((1,), float(asked), dtype=torch.float64, device=device) for asked in requests]
    for name in (*ROUTING, *LOST):
        found = computed.metrics.get(name, {})
        zero = torch.zeros(widths.get(name, 1), dtype=torch.float64, device=device)
        parts += [found[place].double().reshape(-1) if place in found else zero for place in moe_blocks]
    numbers = torch.cat(parts)
    if mesh.world > 1:
        dist.all_reduce(numbers)
    counts = numbers[len(_SCALARS) :][: layers * num_experts].reshape(layers, num_experts).to(torch.int64)
    values = numbers.tolist()  # the one time in a step that the host waits
    scalars, rest = dict(zip(_SCALARS, values, strict=False)), values[len(_SCALARS) :]
    columns: dict[str, list[list[float]]] = {}
    for name in (*ROUTING, *LOST):
        width = widths.get(name, 1)
        columns[name] = [rest[i * width : (i + 1) * width] for i in range(layers)]
        rest = rest[layers * width :]
    return Agreed(
        loss=scalars["loss"],
        balance=scalars["balance"],
        z=scalars["z"],
        norm=scalars["sum_of_squares"] ** 0.5 if scalars["sum_of_squares"] >= 0 else float("nan"),
        overflow=int(sum(row[0] for row in columns["overflow"])),
        expert_counts=[[int(count) for count in row] for row in columns["expert_counts"]],
        probability_sum=columns["probability_sum"],
        router_entropy=[row[0] / max(computed.tokens, 1) for row in columns["router_entropy"]],
        dropped=[int(row[0]) for row in columns["dropped"]],
        save=scalars["save"] > 0,
        stop=scalars["stop"] > 0,
        counts_on_device=counts,
    )
