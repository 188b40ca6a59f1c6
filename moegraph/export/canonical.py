"""One form for settings that compute the same, so that it does not matter which of them a spec has chosen.

    softmax over the chosen logits        = softmax over all, renormalised to sum 1      (neither biases nor groups)
    sigmoid of the chosen logits          = sigmoid scores                               (no groups)
    w / max(Σw, 0)                        = w / (Σw + 0)
    all of n groups kept                  = no groups

The first two choose the same experts because softmax and sigmoid grow with the logit.
"""

from __future__ import annotations

from typing import Any

from moegraph.specs.schema.model import Model
from moegraph.specs.schema.moe import Router, RouterNorm


def canonical(model: Model) -> Model:
    """The same model, its router in the form above."""
    if model.moe is None:
        return model
    moe = model.moe.model_copy(update={"router": _canonical_router(model.moe.router)})
    return model.model_copy(update={"moe": moe})


def _canonical_router(router: Router) -> Router:
    update: dict[str, Any] = {}
    groups = router.groups if router.groups is None or router.groups.keep < router.groups.n else None
    update["groups"] = groups
    if router.norm.eps == 0:
        update["norm"] = router.norm.model_copy(update={"mode": "add"})
    by_logit = groups is None and router.select_bias == "none"  # the experts with the highest logits are chosen
    one = router.norm.kind == "none" or router.norm.eps == 0  # dividing by a sum of 1 changes nothing
    if router.weight_from == "softmax_selected" and by_logit and one:
        update |= {"score": "softmax", "weight_from": "score", "norm": RouterNorm(kind="sum")}
    if router.weight_from == "sigmoid_selected" and (by_logit or router.score == "sigmoid"):
        update |= {"score": "sigmoid", "weight_from": "score"}
    return router.model_copy(update=update)
