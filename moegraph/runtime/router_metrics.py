"""What the routing of a step looked like, per mixture-of-experts layer, and the update of the loss-free bias.

All of it is over the unmasked tokens of the whole step: `counts` [E] says how many choices fell on each expert,
`probability_sum` [E] is Σ over tokens of the normalised scores. With u = 1/E, f the share of choices and P the mean
score of each expert (both sum to 1), the balance loss before its coefficient is

    E · Σ_e f_e P_e  =  1 + E · Σ_e (f_e - u)(P_e - u)  =  1 + alignment

It holds only that inner product down: it can fall while the load gets worse. So the spread of f and of P, E · Σ(f - u)²
and E · Σ(P - u)², are reported beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class LayerRouting:
    """One layer's routing. Everything is 0 (dead experts: all) if no token was counted.

    load_max, load_min: highest and lowest load over the mean load. max_violation: (max - mean) / mean
    (arXiv 2408.15664, equation 4). entropy: mean entropy of the scores over log E. dropped_tokens: choices made but
    not computed: taken out by `layout.overflow: drop`. f_spread, p_spread, alignment, balance: as above.
    """

    counts: tuple[int, ...]
    load_max: float
    load_min: float
    max_violation: float
    dead_experts: int
    entropy: float
    f_spread: float
    p_spread: float
    alignment: float
    balance: float
    dropped_tokens: int = 0

    def to_json(self) -> dict[str, Any]:
        """As it stands in a record of metrics.jsonl."""
        return {**asdict(self), "counts": list(self.counts)}


def layer_routing(
    counts: Sequence[int], probability_sum: Sequence[float], entropy: float, dropped: int = 0
) -> LayerRouting:
    """One layer's routing from its sums over a step (host numbers): `counts` [E], `probability_sum` [E], the mean
    normalised entropy, and how many choices were dropped."""
    experts, choices, mass = len(counts), sum(counts), sum(probability_sum)
    dead = sum(count == 0 for count in counts)
    if choices == 0 or mass == 0:
        return LayerRouting(tuple(counts), 0.0, 0.0, 0.0, dead, 0.0, 0.0, 0.0, 0.0, 0.0, dropped)
    uniform, mean = 1.0 / experts, choices / experts
    f = [count / choices - uniform for count in counts]
    p = [value / mass - uniform for value in probability_sum]
    alignment = experts * sum(a * b for a, b in zip(f, p, strict=True))
    return LayerRouting(
        counts=tuple(counts),
        load_max=max(counts) / mean,
        load_min=min(counts) / mean,
        max_violation=(max(counts) - mean) / mean,
        dead_experts=dead,
        entropy=entropy,
        f_spread=experts * sum(a * a for a in f),
        p_spread=experts * sum(a * a for a in p),
        alignment=alignment,
        balance=1.0 + alignment,
        dropped_tokens=dropped,
    )


def updated_bias(bias: Tensor, counts: Tensor, rate: float) -> Tensor:
    """The selection bias after a step: bias + rate · sign(mean(counts) - counts) (arXiv 2408.15664).

    bias [..., E] float32 or float64, counts [..., E] int64 summed over the whole step. The sign is taken in whole
    numbers, so an expert with exactly the mean load keeps its bias. Returns a new tensor.
    """
    excess = counts * counts.shape[-1] - counts.sum(-1, keepdim=True)
    return bias - rate * excess.sign().to(bias.dtype)
