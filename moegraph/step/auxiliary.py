"""How auxiliary outputs of blocks become part of the loss, and which tangents that gives them.

    scalar output v of a layer: coefficient · layers' factor · share · v           tangent: the factor before v
    vector `probability_sum` p: coefficient · factor · E · Σ_e f_e · p_e / N   tangent: coefficient · factor · E · f/N

`share` is this micro-batch's part of the step's unmasked tokens, so micro-batches and ranks just add up; N counts the
unmasked tokens the mean is over. f comes from the expert counts and has no gradient (arXiv 2101.03961).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moegraph.specs.schema import Balance, Spec

OUTPUTS = ("balance", "z", "probability_sum")  # auxiliary outputs of a block that have a coefficient


@dataclass(frozen=True)
class AuxiliaryRule:
    """Coefficients of one spec's auxiliary losses."""

    balance: Balance
    num_experts: int
    top_k: int
    moe_layers: int

    @classmethod
    def from_spec(cls, spec: Spec) -> AuxiliaryRule | None:
        """The rule of a spec, or None when it has no router or its balance pass is off."""
        moe = spec.model.moe
        if moe is None or not spec.passes.balance_losses.enabled:
            return None
        layers = sum(not spec.model.is_dense(layer) for layer in range(spec.model.num_layers))
        return cls(moe.balance, moe.num_experts, moe.top_k, max(layers, 1))

    @property
    def needs_all_forwards(self) -> bool:
        """Whether a tangent depends on forwards of other micro-batches."""
        return self.balance.coef > 0 and self.balance.over == "global_batch"

    @property
    def uses_sums(self) -> bool:
        """Whether the balance loss is made from `probability_sum` vectors rather than scalars."""
        return self.balance.coef > 0 and (self.balance.over == "global_batch" or self.balance.layers == "pooled")

    def scalar_factor(self, name: str, share: float) -> float:
        """What a scalar output (`balance` or `z`) is multiplied by; also its tangent."""
        coefficient = self.balance.coef if name == "balance" else self.balance.z_coef
        layers = 1.0 if self.balance.layers == "sum" else 1.0 / self.moe_layers
        return coefficient * layers * share

    def from_sums(
        self, counts: list[Tensor], sums: list[Tensor], tokens: int, share: float
    ) -> tuple[Tensor, list[Tensor]]:
        """The balance loss of a set of tokens from each MoE layer's `expert_counts` [E] and `probability_sum` [E],
        and the tangent of each layer's `probability_sum`. `tokens` is how many unmasked tokens the set holds."""
        tokens = max(tokens, 1)
        choices = tokens * (self.top_k if self.balance.f_norm == 1 else 1)
        scale = self.balance.coef * self.num_experts * share / tokens
        if self.balance.layers == "pooled":
            layers = len(counts)
            frequency = torch.stack([c.to(sums[0].dtype) for c in counts]).sum(0) / (choices * layers)
            tangent = frequency * (scale / layers)
            return torch.stack([tangent * p for p in sums]).sum(), [tangent for _ in sums]
        factor = 1.0 if self.balance.layers == "sum" else 1.0 / self.moe_layers
        tangents = [c.to(p.dtype) / choices * (scale * factor) for c, p in zip(counts, sums, strict=True)]
        return torch.stack([t * p for t, p in zip(tangents, sums, strict=True)]).sum(), tangents
