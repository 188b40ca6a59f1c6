"""Rules of `model.moe`: the number of choices, groups, routers that cannot learn, settings without effect."""

from __future__ import annotations

from moegraph.specs.rules import Report, Rule, divisors, listing
from moegraph.specs.schema.moe import Balance, RouterNorm
from moegraph.specs.schema.spec import Spec

ROUTER = "model.moe.router"
BALANCE = "model.moe.balance"


def top_k_within_experts(spec: Spec, report: Report) -> None:
    """A token cannot choose more experts than there are."""
    moe = spec.model.moe
    if moe is not None and moe.top_k > moe.num_experts:
        message = f"top_k {moe.top_k} is more than num_experts {moe.num_experts}"
        report.add("model.moe.top_k", message, allowed=f"1 to {moe.num_experts}")


def groups_divide_experts(spec: Spec, report: Report) -> None:
    """Groups have equal size, and at least two experts where a group's score is the sum of its best two."""
    moe = spec.model.moe
    groups = moe.router.groups if moe is not None else None
    if moe is None or groups is None:
        return
    path = f"{ROUTER}.groups.n"
    if moe.num_experts % groups.n:
        message = f"num_experts {moe.num_experts} is not divisible by {groups.n} groups"
        report.add(path, message, allowed=listing(divisors(moe.num_experts)))
    elif groups.score == "top2_sum" and moe.num_experts // groups.n < 2:
        message = (
            f"{groups.n} groups of {moe.num_experts} experts have one expert each, and score top2_sum adds the best two"
        )
        fits = [each for each in divisors(moe.num_experts) if moe.num_experts // each >= 2]
        report.add(path, message, allowed=listing(fits) or None, fix=f"use fewer groups, or {ROUTER}.groups.score=max")


def kept_groups_hold_top_k(spec: Spec, report: Report) -> None:
    """The groups that are kept must have top_k experts between them."""
    moe = spec.model.moe
    groups = moe.router.groups if moe is not None else None
    if moe is None or groups is None:
        return
    path = f"{ROUTER}.groups.keep"
    if groups.keep > groups.n:
        report.add(path, f"keep {groups.keep} is more than the {groups.n} groups there are", allowed=f"1 to {groups.n}")
    elif moe.num_experts % groups.n == 0 and groups.keep * (moe.num_experts // groups.n) < moe.top_k:
        each = moe.num_experts // groups.n
        message = f"{groups.keep} groups of {each} experts hold {groups.keep * each}, fewer than top_k {moe.top_k}"
        least = -(-moe.top_k // each)
        report.add(path, message, allowed=f"{least} to {groups.n}" if least <= groups.n else None)


def masked_groups_stay_masked(spec: Spec, report: Report) -> None:
    """Filling masked scores with zero only hides them from scores that are never negative."""
    moe = spec.model.moe
    groups = moe.router.groups if moe is not None else None
    if moe is None or groups is None or groups.fill != "zero" or groups.keep >= groups.n:
        return
    if moe.router.score == "none" or moe.router.select_bias != "none":
        cause = "score none" if moe.router.score == "none" else f"select_bias {moe.router.select_bias}"
        message = (
            f"masked experts get the score 0, but with {cause} the allowed ones can be below 0, so masked experts win"
        )
        report.add(f"{ROUTER}.groups.fill", message, allowed="-inf")


def router_gets_gradient(spec: Spec, report: Report) -> None:
    """With one expert per token, a weight that is normalised over the chosen ones is 1 whatever the router says."""
    moe = spec.model.moe
    if moe is None or moe.top_k != 1 or moe.num_experts == 1:
        return
    constant = "so it is constant, the gradient of the router is zero, and the router never learns"
    if moe.router.weight_from == "softmax_selected":
        message = f"with top_k 1 the softmax over the one selected logit is always 1, {constant}"
        fix = f"use {ROUTER}.weight_from=score or sigmoid_selected, or top_k of 2 or more"
        report.add(f"{ROUTER}.weight_from", message, allowed="score, sigmoid_selected", fix=fix)
    elif moe.router.norm.kind == "sum":
        message = f"with top_k 1 the one weight divided by the sum of the weights is always 1, {constant}"
        report.add(f"{ROUTER}.norm.kind", message, allowed="none", fix="use norm none, or top_k of 2 or more")


def logits_are_not_normalised(spec: Spec, report: Report) -> None:
    """Raw logits have any sign, so their sum is no norm."""
    router = spec.model.moe.router if spec.model.moe is not None else None
    if router is not None and router.norm.kind == "sum" and router.score == "none" and router.weight_from == "score":
        message = (
            "score none makes the weights raw logits of either sign, and their sum, which norm divides by, can be 0"
        )
        report.add(f"{ROUTER}.norm.kind", message, fix="use score softmax or sigmoid, or weight_from softmax_selected")


def router_settings_have_effect(spec: Spec, report: Report) -> None:
    """Options of something that is switched off are refused, not ignored."""
    router = spec.model.moe.router if spec.model.moe is not None else None
    if router is None:
        return
    if router.norm.kind == "none":
        for name in ("eps", "mode"):
            if getattr(router.norm, name) != RouterNorm.model_fields[name].default:
                report.add(
                    f"{ROUTER}.norm.{name}", "has no effect with norm.kind none", fix=f"add {ROUTER}.norm.kind=sum"
                )
    if (
        router.select_bias == "none"
        and router.bias_update_rate != type(router).model_fields["bias_update_rate"].default
    ):
        fix = f"add {ROUTER}.select_bias=learned_free, or remove it"
        report.add(f"{ROUTER}.bias_update_rate", "has no effect with select_bias none", fix=fix)


def balance_settings_have_effect(spec: Spec, report: Report) -> None:
    """Who says how the balance loss is taken, and not how much of it, has forgotten something."""
    balance = spec.model.moe.balance if spec.model.moe is not None else None
    if balance is None or balance.coef != 0 or report.written(f"{BALANCE}.coef"):
        return
    for name in ("over", "layers", "f_norm"):
        if getattr(balance, name) != Balance.model_fields[name].default:
            message = "has no effect, since balance.coef is not given and is 0 by default"
            report.add(f"{BALANCE}.{name}", message, fix=f"add {BALANCE}.coef, 0 if that is meant")


def pooled_layers_share_a_mean(spec: Spec, report: Report) -> None:
    """Layers are pooled by adding up their sums over one set of tokens; a loss per sequence has no such sum."""
    balance = spec.model.moe.balance if spec.model.moe is not None else None
    if balance is not None and balance.layers == "pooled" and balance.over == "sequence":
        message = "layers pooled takes f and P over all tokens at once, and over sequence takes each sequence by itself"
        fix = "use over: micro_batch or global_batch, or layers: sum or mean"
        report.add(f"{BALANCE}.layers", message, allowed="sum, mean", fix=fix)


RULES: tuple[Rule, ...] = (
    top_k_within_experts,
    groups_divide_experts,
    kept_groups_hold_top_k,
    masked_groups_stay_masked,
    router_gets_gradient,
    logits_are_not_normalised,
    router_settings_have_effect,
    balance_settings_have_effect,
    pooled_layers_share_a_mean,
)
