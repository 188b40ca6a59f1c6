"""Choosing experts: scores, an optional selection bias, optional groups, top-k, and the weights of the chosen.

One parametric router says every published one (the names are those of the spec's `model.moe.router`):

1. scores = softmax | sigmoid | none of the logits.
2. choice = scores + select_bias. The bias moves the choice only, never a weight (arXiv 2408.15664).
3. groups: experts outside the `keep` best of `n` groups are taken out of the choice (arXiv 2405.04434, 2412.19437).
4. ids = the k best of the choice. Equal values: the lowest expert id first.
5. weights = scores of the chosen, or softmax / sigmoid over the chosen logits; renormalised; times `scale`.

No gradient flows through the choice. A NaN logit sorts above every number, as in torch.sort: that expert is chosen
and its weight is NaN, so that the loss shows it instead of hiding it; ids stay inside 0 … E-1 whatever the logits.

Legend: T tokens, E experts, K top-k.
"""

from typing import Literal

import torch
from torch import Tensor

from moegraph.ops.precision import accumulate_dtype

Score = Literal["softmax", "sigmoid", "none"]
WeightFrom = Literal["score", "softmax_selected", "sigmoid_selected"]
Groups = tuple[int, int, Literal["top2_sum", "max"], Literal["-inf", "zero"]]


@torch.library.custom_op("moegraph::choose_experts", mutates_args=())
def _choose_experts(scores: Tensor, k: int) -> Tensor:
    if scores.device.type == "cuda" and scores.dtype == torch.float32:
        from moegraph.kernels import top_k

        if scores.shape[1] <= top_k.MAX_EXPERTS:
            return top_k.top_k(scores, k)
    # torch.topk breaks ties differently on every device; a stable sort keeps the lowest id first on all.
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :k].to(torch.int32)


@_choose_experts.register_fake
def _(scores: Tensor, k: int) -> Tensor:
    return scores.new_empty(scores.shape[0], k, dtype=torch.int32)


def choose_experts(scores: Tensor, k: int) -> Tensor:
    """The k largest of scores [T, E] per row → ids [T, K] int32, best first, the lowest id first among equals.

    On CUDA moegraph's Triton kernel chooses, for float32 scores of up to 1024 experts; elsewhere a stable torch.sort
    gives the same ids. Not differentiable. Raises ValueError when k is not in 1 … E.
    """
    if not 1 <= k <= scores.shape[-1]:
        raise ValueError(f"top_k {k} is not between 1 and the number of experts {scores.shape[-1]}")
    ids: Tensor = _choose_experts(scores.detach(), k)
    return ids


def expert_scores(logits: Tensor, score: Score) -> Tensor:
    """Scores [T, E] of logits [T, E]: their softmax over experts, their sigmoid, or themselves."""
    if score == "softmax":
        return torch.softmax(logits, dim=-1)
    if score == "sigmoid":
        return torch.sigmoid(logits)
    if score == "none":
        return logits
    raise ValueError(f"score {score!r} is not one of softmax, sigmoid, none")


def _group_limited(choice: Tensor, groups: Groups, top_k: int, nonnegative: bool) -> Tensor:
    """The choice with the experts of all but the best groups taken out.

    `-inf` takes them out whatever the other values are. `zero` is DeepSeek-V2's rule, made for scores that are never
    negative; there -inf chooses the same experts, and ties at zero stay inside the kept groups. With a selection bias
    or raw logits, zero is taken literally: an excluded expert then beats a kept one below zero.
    """
    num_groups, keep, how, fill = groups
    size = choice.shape[-1] // num_groups
    if size * num_groups != choice.shape[-1] or not 1 <= keep <= num_groups or keep * size < top_k:
        raise ValueError(
            f"{choice.shape[-1]} experts in {num_groups} groups of which {keep} are kept do not leave top_k {top_k}"
        )
    grouped = choice.reshape(-1, num_groups, size)
    best = grouped.topk(min(2, size), dim=-1).values.sum(-1) if how == "top2_sum" else grouped.amax(-1)
    kept = choose_experts(best, keep).to(torch.int64)
    keeps = torch.zeros_like(best, dtype=torch.bool).scatter(1, kept, True)
    value = 0.0 if fill == "zero" and not nonnegative else float("-inf")
    return grouped.masked_fill(~keeps[:, :, None], value).reshape(choice.shape)


def _selected_weights(logits: Tensor, scores: Tensor, ids: Tensor, weight_from: WeightFrom) -> Tensor:
    index = ids.to(torch.int64)
    if weight_from == "score":
        return scores.gather(1, index)
    if weight_from == "softmax_selected":
        return torch.softmax(logits.gather(1, index), dim=-1)
    if weight_from == "sigmoid_selected":
        return torch.sigmoid(logits.gather(1, index))
    raise ValueError(f"weight_from {weight_from!r} is not one of score, softmax_selected, sigmoid_selected")


def _renormalised(weights: Tensor, kind: str, eps: float, mode: str) -> Tensor:
    if kind == "none":
        return weights
    if kind != "sum" or mode not in ("add", "clamp"):
        raise ValueError(f"norm {kind!r} with mode {mode!r}: kind is none or sum, mode is add or clamp")
    total = weights.sum(-1, keepdim=True)
    return weights / (total.clamp(min=eps) if mode == "clamp" else total + eps)


def route(
    logits: Tensor,
    select_bias: Tensor | None = None,
    *,
    score: Score = "softmax",
    top_k: int,
    groups: Groups | None = None,
    weight_from: WeightFrom = "score",
    norm_kind: Literal["none", "sum"] = "none",
    norm_eps: float = 0.0,
    norm_mode: Literal["add", "clamp"] = "add",
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Logits [T, E] and an optional select_bias [E] → (weights [T, K], ids [T, K] int32), best choice first.

    Weights have the logits' dtype, which `router_logits` makes float32 or float64. groups = (n, keep, score, fill);
    norm: w / (Σw + eps), or w / max(Σw, eps) with mode clamp. Raises ValueError for a value outside the vocabulary,
    top_k outside 1 … E, or groups that leave fewer than top_k experts.
    """
    scores = expert_scores(logits, score)
    choice = scores.detach() if select_bias is None else scores.detach() + select_bias.detach()
    if groups is not None:
        choice = _group_limited(choice, groups, top_k, nonnegative=select_bias is None and score != "none")
    ids = choose_experts(choice, top_k)
    weights = _renormalised(_selected_weights(logits, scores, ids, weight_from), norm_kind, norm_eps, norm_mode)
    return (weights if scale == 1.0 else weights * scale), ids


def expert_counts(ids: Tensor, token_mask: Tensor | None, num_experts: int) -> Tensor:
    """How many of the choices ids [T, K] in 0 … E-1 fell on each expert → [E] int64, where token_mask [T] holds.

    No gradient, no host synchronisation (torch.bincount has one).
    """
    flat = ids.reshape(-1).to(torch.int64)
    if token_mask is None:
        ones = torch.ones_like(flat)
    else:
        ones = token_mask.to(torch.int64)[:, None].expand(ids.shape).reshape(-1)
    return torch.zeros(num_experts, dtype=torch.int64, device=ids.device).scatter_add(0, flat, ones)


def router_probabilities(logits: Tensor, score: Score) -> Tensor:
    """Scores of logits [T, E] normalised to sum to 1 over the experts, for balance losses and metrics.

    softmax and none: the softmax. sigmoid: σ(l_e) / Σ σ(l), as softmax(log σ(l)), which sums to 1 however small the
    sigmoids are; dividing by a sum plus epsilon would let a router lower its loss by pushing every score to zero.
    """
    wide = logits.to(accumulate_dtype(logits.dtype))
    if score == "sigmoid":
        # log σ(l) = -softplus(-l); past 50, softplus(x) = x to within float64's precision.
        return torch.softmax(-torch.nn.functional.softplus(-wide, threshold=50.0), dim=-1)
    if score in ("softmax", "none"):
        return torch.softmax(wide, dim=-1)
    raise ValueError(f"score {score!r} is not one of softmax, sigmoid, none")
