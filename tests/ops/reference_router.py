"""An independent router: the choice made token by token in plain Python, the arithmetic in torch.

Same vocabulary as `moegraph.ops.route`. Values are compared as Python floats, which hold every float32 exactly; equal
values go to the lowest expert id.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def best(values: list[float], count: int) -> list[int]:
    """Indices of the `count` largest values, the largest first, the lowest index first among equals."""
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]


def keep_groups(choice: Tensor, groups: tuple[int, int, str, str], nonnegative: bool) -> list[float]:
    """One token's choice [E] with the experts of all but the best groups replaced by the fill value."""
    count, keep, how, fill = groups
    size = len(choice) // count
    worth = []
    for start in range(0, len(choice), size):
        members = choice[start : start + size]
        leading = best(members.tolist(), 2 if how == "top2_sum" else 1)
        total = members[leading[0]]
        for other in leading[1:]:
            total = total + members[other]  # in the tensor's own precision
        worth.append(float(total))
    kept = best(worth, keep)
    excluded = float("-inf") if fill == "-inf" or nonnegative else 0.0
    return [value if e // size in kept else excluded for e, value in enumerate(choice.tolist())]


def route(logits: Tensor, select_bias: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor]:
    """(weights [T, K], ids [T, K] int64) for logits [T, E]."""
    score, top_k = options.get("score", "softmax"), options["top_k"]
    scores = {"softmax": lambda: torch.softmax(logits, -1), "sigmoid": logits.sigmoid, "none": lambda: logits}[score]()
    chosen = []
    for row in scores:
        choice = row if select_bias is None else row + select_bias
        groups = options.get("groups")
        nonnegative = select_bias is None and score != "none"
        chosen.append(best(keep_groups(choice, groups, nonnegative) if groups else choice.tolist(), top_k))
    ids = torch.tensor(chosen, dtype=torch.int64).reshape(len(chosen), top_k)

    weight_from = options.get("weight_from", "score")
    picked = torch.take_along_dim(scores if weight_from == "score" else logits, ids, 1)
    if weight_from == "softmax_selected":
        picked = torch.softmax(picked, -1)
    elif weight_from == "sigmoid_selected":
        picked = picked.sigmoid()
    if options.get("norm_kind", "none") == "sum":
        total, eps = picked.sum(1, keepdim=True), options.get("norm_eps", 0.0)
        picked = picked / (total.clamp_min(eps) if options.get("norm_mode") == "clamp" else total + eps)
    return picked * options.get("scale", 1.0), ids
