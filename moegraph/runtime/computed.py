"""What the compute phase of a step found on one rank, and how it is summed over micro-batches."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from moegraph.runtime.executor import Activations

ROUTING = ("expert_counts", "probability_sum", "router_entropy")
LOST = ("overflow", "dropped")  # rows that did not fit: the step does not count; choices dropped by rule


@dataclass
class Computed:
    """What the compute phase of a step found on this rank, still on the device.

    `loss` is this rank's part of the mean cross entropy of the step's valid targets; `balance` and `z` are what its
    auxiliary losses add to it, coefficients included. Ranks just add up. `metrics` maps a name of ROUTING or LOST to
    {place of a block in the model: sum over micro-batches} (the entropy: times tokens).
    """

    loss: Tensor
    balance: Tensor
    z: Tensor
    tokens: int  # unmasked tokens of the whole step
    metrics: dict[str, dict[int, Tensor]] = field(default_factory=dict)

    def stacked(self, name: str) -> Tensor | None:
        """A metric over the MoE layers of this rank, in order: expert_counts [L, E], router_entropy [L] as a mean."""
        found = self.metrics.get(name)
        if not found:
            return None
        values = torch.stack([found[place] for place in sorted(found)])
        return values / max(self.tokens, 1) if name == "router_entropy" else values

    @property
    def expert_counts(self) -> Tensor | None:
        """[MoE layers of this rank, E] int64."""
        return self.stacked("expert_counts")

    @property
    def probability_sum(self) -> Tensor | None:
        """[MoE layers of this rank, E]."""
        return self.stacked("probability_sum")

    @property
    def router_entropy(self) -> Tensor | None:
        """[MoE layers of this rank]."""
        return self.stacked("router_entropy")


class Parts:
    """Sums over micro-batches of what a rank reports."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.loss: Tensor | None = None
        self.auxiliary: dict[str, Tensor] = {}
        self.metrics: dict[str, dict[int, Tensor]] = {}

    def add(self, name: str, value: Tensor) -> None:
        """Adds to an auxiliary loss."""
        self.auxiliary[name] = self.auxiliary[name] + value if name in self.auxiliary else value

    def collect(self, activations: Activations) -> None:
        """Adds what a micro-batch reported in a stage."""
        if activations.hidden is None:
            loss = activations.loss
            self.loss = loss if self.loss is None else self.loss + loss
        for name in (*ROUTING, *LOST):
            found = self.metrics.setdefault(name, {})
            for place, value in activations.metrics(name):
                # The entropy is a mean over a micro-batch's tokens: weighed by them, ranks and micro-batches add up.
                part = value * activations.unmasked_tokens if name == "router_entropy" else value
                found[place] = found[place] + part if place in found else part

    def finish(self, tokens: int) -> Computed:
        """The sums; `tokens` are the unmasked tokens of the whole step."""
        zero = torch.zeros((), device=self.device)
        loss = self.loss if self.loss is not None else zero
        balance, z = self.auxiliary.get("balance", zero), self.auxiliary.get("z", zero)
        return Computed(loss, balance, z, tokens, {name: found for name, found in self.metrics.items() if found})
