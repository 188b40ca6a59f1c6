"""balance-losses: adds the auxiliary losses on the router that the spec names.

    moe.router -> moe.route -> …          moe.router -> moe.route -> …
                                     =>   moe.balance_loss = balance_sequence(moe.router, moe.ids, token_mask, …)
                                          moe.z_loss       = z_loss(moe.router, token_mask)
    return hidden                         return hidden, auxiliary balance, auxiliary z

Each is an output of its block with a tangent of its own, so it needs no path through later blocks and is added once
however the blocks are cut into stages. The values are before their coefficients: the runtime multiplies by
coefficient · layers' factor · this micro-batch's share of the step's tokens, once, in the loss and in the tangent
(`moegraph.step.auxiliary`). With `over: global_batch` or `layers: pooled` the loss needs numbers of other forwards;
then the output is the block's `probability_sum` [E], and its tangent the gradient of the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import fx

from moegraph import ops
from moegraph.graph.edit import Rewriter
from moegraph.graph.program import Unit
from moegraph.passes.contract import Level, Pass, PassContext, PassResult
from moegraph.passes.registry import registry
from moegraph.specs.schema import Balance, Spec


@registry.register
@dataclass(frozen=True)
class BalanceLosses(Pass):
    """Adds balance and z losses to each block that routes."""

    over: Literal["micro_batch", "sequence", "global_batch"]
    pooled: bool
    f_norm: Literal[1, "k"]
    balance: bool
    z: bool

    name: ClassVar[str] = "balance-losses"
    level: ClassVar[Level] = "layer"
    provides: ClassVar[frozenset[str]] = frozenset({"auxiliary-losses"})

    @classmethod
    def from_spec(cls, spec: Spec) -> BalanceLosses | None:
        balance = spec.model.moe.balance if spec.model.moe is not None else Balance()
        if not spec.passes.balance_losses.enabled:
            return None
        return cls(
            over=balance.over,
            pooled=balance.layers == "pooled",
            f_norm=balance.f_norm,
            balance=balance.coef > 0,
            z=balance.z_coef > 0,
        )

    def apply(self, unit: Unit, context: PassContext) -> PassResult:
        rewriter = Rewriter(unit.graphs["layer"], self.name)
        routes = rewriter.find(ops.route)
        if not routes:
            return PassResult(unit, note="no router in this block")
        if not (self.balance or self.z):
            return PassResult(unit, note="the spec's coefficients are 0")
        (route,) = routes
        if self.balance:
            self._add_balance(rewriter, route, context.spec)
        if self.z:
            logits, mask = route.args[0], _mask(rewriter)
            node = rewriter.call_before(rewriter.output_node(), "moe.z_loss", ops.z_loss, logits, mask)
            rewriter.set_output("auxiliary", "z", node)
        return PassResult(unit.with_graphs({"layer": rewriter.finish()}), rewriter.rewritten)

    def _add_balance(self, rewriter: Rewriter, route: fx.Node, spec: Spec) -> None:
        score = route.kwargs["score"]
        if self.over == "global_batch" or self.pooled:
            (sums,) = rewriter.find(ops.probability_sum)
            rewriter.set_output("auxiliary", "probability_sum", sums)
            rewriter.rewritten.append("moe.probability_sum")
            return
        ids = rewriter.results(route)[1]
        options = {"score": score, "top_k": route.kwargs["top_k"], "f_norm": self.f_norm}
        target: Callable[..., Any] = ops.balance_micro_batch
        if self.over == "sequence":
            target, options["sequences"] = ops.balance_sequence, spec.sequences_per_microbatch
        arguments = (route.args[0], ids, _mask(rewriter))
        node = rewriter.call_before(rewriter.output_node(), "moe.balance_loss", target, *arguments, **options)
        rewriter.set_output("auxiliary", "balance", node)


def _mask(rewriter: Rewriter) -> fx.Node | None:
    """The padding mask [T] that the block's counts use, or None when there is no padding."""
    (counts,) = rewriter.find(ops.expert_counts)
    return counts.args[1]  # type: ignore[return-value]


def definition(spec: Spec) -> str:
    """The losses this spec names, as a formula people can check."""
    moe = spec.model.moe
    if moe is None or (moe.balance.coef == 0 and moe.balance.z_coef == 0):
        return "no balance loss"
    if not spec.passes.balance_losses.enabled:
        return "no balance loss, passes.balance-losses is off"
    balance, parts = moe.balance, []
    if balance.coef > 0:
        over = {"micro_batch": "each micro-batch", "sequence": "each sequence", "global_batch": "the global batch"}
        f_sum = "1" if balance.f_norm == 1 else f"top_k = {moe.top_k}"
        how = {"sum": "summed over layers", "mean": "averaged over layers", "pooled": "f and P pooled over layers"}
        parts.append(
            f"{balance.coef:g} · num_experts · Σ_e f_e · P_e, f and P over {over[balance.over]}, Σ f = {f_sum}, "
            f"{how[balance.layers]}"
        )
    if balance.z_coef > 0:
        how_z = "summed" if balance.layers == "sum" else "averaged"
        parts.append(f"{balance.z_coef:g} · mean logsumexp(logits)², {how_z} over layers")
    return "; ".join(parts) + "; padding not counted, added once"
