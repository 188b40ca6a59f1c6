"""balance-routing: every expert gets as many tokens, whatever the router says; for measuring only.

    ids = choose_experts(scores, k)      =>      ids = balanced_choice(scores, k)

A fresh router sends some ranks half as many rows again as others, and all wait for the fullest. Published speeds are of
balanced routing (OLMo-core: of random routing); with this pass, what is compared is the system, not the luck of a seed.
The weights of the chosen experts and every kernel stay as they are; `moegraph train` never has this pass.

Legend: T tokens, E experts, K top-k.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from moegraph.graph.edit import Rewriter
from moegraph.graph.names import display_name, facts
from moegraph.graph.program import Unit
from moegraph.passes.contract import Level, Pass, PassContext, PassResult, Tier
from moegraph.passes.registry import registry

_STRIDE, _PERIOD = 40503, 65536  # token · stride mod period visits every residue: close to evenly spread


@torch.library.custom_op("moegraph::balanced_choice", mutates_args=())
def _balanced_choice(scores: Tensor, k: int) -> Tensor:
    tokens, experts = scores.shape
    start = torch.arange(tokens, device=scores.device) * _STRIDE % _PERIOD * experts // _PERIOD
    others = torch.arange(k, device=scores.device) * max(experts // k, 1)
    return ((start[:, None] + others) % experts).to(torch.int32)


@_balanced_choice.register_fake
def _(scores: Tensor, k: int) -> Tensor:
    return scores.new_empty(scores.shape[0], k, dtype=torch.int32)


def balanced_choice(scores: Tensor, k: int) -> Tensor:
    """ids [T, K] int32 of K different experts each, E // K apart, so that every expert is in close to T·K / E rows."""
    ids: Tensor = _balanced_choice(scores, k)
    return ids


@dataclass(frozen=True)
class BalanceRouting(Pass):
    """Puts a balanced choice of experts in the place of the router's."""

    name: ClassVar[str] = "balance-routing"
    level: ClassVar[Level] = "step"
    tier: ClassVar[Tier] = "close"
    tolerance: ClassVar[float] = float("inf")  # other experts: nothing stays close
    requires: ClassVar[frozenset[str]] = frozenset({"joint"})

    def apply(self, unit: Unit, context: PassContext) -> PassResult:
        rewriter = Rewriter(unit.graphs["joint"], self.name)
        for node in rewriter.find(torch.ops.moegraph.choose_experts.default):
            target = torch.ops.moegraph.balanced_choice.default
            choice = rewriter.call_before(node, f"{display_name(node)}.balanced", target, *node.args)
            facts(choice).update(layer=facts(node)["layer"], direction=facts(node)["direction"])
            rewriter.replace(node, choice)
        if not rewriter.rewritten:
            return PassResult(unit, note="no experts are chosen here")
        return PassResult(unit.with_graphs({"joint": rewriter.finish()}), rewriter.rewritten)


def register() -> None:
    """From now on in this process every compiled spec has the pass."""
    registry.register(BalanceRouting)
