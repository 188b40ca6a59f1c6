"""Balance and z losses of the router, and its entropy.

The balance loss is the Switch Transformer's (arXiv 2101.03961): E · Σ_e f_e · P_e, where f_e is the share of the
choices that fell on expert e (no gradient) and P_e the mean normalised score. f sums to 1 with `f_norm` 1, to top_k
with "k". Its value at perfect balance is 1, or top_k. The set of tokens the means are taken over is the scope:

- `balance_micro_batch`: all tokens of the micro-batch.
- `balance_sequence`: each sequence by itself, weighed by its share of the micro-batch's tokens.
- any larger scope (the global batch, or layers pooled): `expert_counts` and `probability_sum` summed over it, from
  which `moegraph.step.auxiliary` makes the loss.

A token where token_mask is False is padding: it counts nowhere, and a scope without tokens contributes zero.

Legend: T tokens = B·S, B sequences, S sequence length, E experts, K top-k. Results are float32 (float64 for float64).
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from moegraph.ops.precision import accumulate_dtype
from moegraph.ops.routing import Score, router_probabilities

FNorm = Literal[1, "k"]


def _f_total(f_norm: FNorm, top_k: int) -> int:
    if f_norm not in (1, "k"):
        raise ValueError(f"f_norm {f_norm!r} is neither 1 nor 'k'")
    return top_k if f_norm == "k" else 1


def _counted(values: Tensor, token_mask: Tensor | None) -> Tensor:
    """values [T, ...] with those of padding tokens replaced by zero."""
    if token_mask is None:
        return values
    return values.masked_fill(~token_mask.reshape(-1, *[1] * (values.dim() - 1)), 0.0)


def _tokens(token_mask: Tensor | None, logits: Tensor) -> Tensor:
    """Number of counted tokens as a 0-d tensor, at least 1 so that it can divide."""
    dtype = accumulate_dtype(logits.dtype)
    if token_mask is None:
        return torch.full((), max(1, logits.shape[0]), dtype=dtype, device=logits.device)
    return token_mask.sum().to(dtype).clamp(min=1.0)


def balance_sequence(
    logits: Tensor,
    ids: Tensor,
    token_mask: Tensor | None,
    *,
    score: Score,
    sequences: int,
    top_k: int,
    f_norm: FNorm = 1,
) -> Tensor:
    """Σ over sequences of (its tokens / all tokens) · E · Σ_e f·P within that sequence, 0-d.

    logits [T, E], ids [T, K], token_mask [T] bool; T = sequences · S, rows of one sequence together.
    """
    tokens, experts = logits.shape
    length = tokens // sequences if sequences else 0
    probabilities = _counted(router_probabilities(logits, score), token_mask)
    dtype = probabilities.dtype
    if token_mask is None:
        counted = torch.ones(sequences, length, dtype=dtype, device=logits.device)
    else:
        counted = token_mask.reshape(sequences, length).to(dtype)
    choices = ids.reshape(sequences, length * top_k).to(torch.int64)
    ones = counted[:, :, None].expand(sequences, length, top_k).reshape(sequences, length * top_k)
    counts = torch.zeros(sequences, experts, dtype=dtype, device=logits.device).scatter_add(1, choices, ones)
    in_sequence = counted.sum(-1)
    divisor = in_sequence.clamp(min=1.0)[:, None]
    f = counts / (divisor * top_k) * _f_total(f_norm, top_k)
    p = probabilities.reshape(sequences, length, experts).sum(1) / divisor
    weight = in_sequence / in_sequence.sum().clamp(min=1.0)
    return (weight * (f * p).sum(-1)).sum() * experts


def balance_micro_batch(
    logits: Tensor, ids: Tensor, token_mask: Tensor | None, *, score: Score, top_k: int, f_norm: FNorm = 1
) -> Tensor:
    """E · Σ_e f·P with both means over all tokens given, 0-d. logits [T, E], ids [T, K], token_mask [T] bool."""
    return balance_sequence(logits, ids, token_mask, score=score, sequences=1, top_k=top_k, f_norm=f_norm)


def probability_sum(logits: Tensor, token_mask: Tensor | None, score: Score) -> Tensor:
    """Σ over counted tokens of the normalised scores of logits [T, E] → [E]."""
    return _counted(router_probabilities(logits, score), token_mask).sum(0)


def z_loss(logits: Tensor, token_mask: Tensor | None) -> Tensor:
    """Mean over counted tokens of logsumexp(logits [T, E])², 0-d (arXiv 2202.08906)."""
    wide = logits.to(accumulate_dtype(logits.dtype))
    lse = torch.logsumexp(wide, dim=-1)
    return _counted(lse * lse, token_mask).sum() / _tokens(token_mask, logits)


def router_entropy(logits: Tensor, token_mask: Tensor | None, score: Score) -> Tensor:
    """Mean entropy of a token's normalised scores divided by log E, 0-d in 0 … 1; 1 is undecided, as is E = 1.

    A metric: no gradient.
    """
    experts = logits.shape[-1]
    p = router_probabilities(logits.detach(), score)
    if experts == 1:
        return torch.ones((), dtype=p.dtype, device=p.device)
    entropy = -(p * torch.log(p.clamp(min=torch.finfo(p.dtype).tiny))).sum(-1)
    return _counted(entropy, token_mask).sum() / (_tokens(token_mask, logits) * math.log(experts))
