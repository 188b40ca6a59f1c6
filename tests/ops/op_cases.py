"""One small call of every operator of the layer graph: T=5, E=3, K=2, with an unused expert and a masked token.

A case's `call` takes the tensors that `inputs(dtype)` makes; floating inputs are those to differentiate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moegraph import ops

T, D, F, E, K, V = 5, 4, 3, 3, 2, 7
IDS = torch.tensor([[0, 2], [2, 0], [2, 0], [0, 2], [2, 0]], dtype=torch.int32)  # expert 1 has no tokens
MASK = torch.tensor([True, True, True, False, True])
DOCUMENTS = torch.tensor([[0, 0, 1, 1, 1], [0, 0, 0, -1, -1]], dtype=torch.int32)
POSITIONS = torch.tensor([[0, 1, 0, 1, 2], [0, 1, 2, 0, 0]], dtype=torch.int32)
LABELS = torch.tensor([0, 6, -100, 3, 3])


@dataclass(frozen=True)
class Case:
    """`shapes` are random floating inputs, `fixed` integer or boolean ones that follow them."""

    name: str
    call: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    fixed: tuple[Tensor, ...] = ()
    differentiable: bool = True
    outputs: tuple[int, ...] = (0,)  # which outputs have gradients

    def inputs(self, dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        made = [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in self.shapes]
        return [*made, *(t.clone() for t in self.fixed)]

    def results(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        out = self.call(*tensors)
        return out if isinstance(out, tuple) else (out,)

    def differentiated(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        results = self.results(*tensors)
        return tuple(results[i] for i in self.outputs)


def _sorted(dropped: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    ids = IDS.clone()
    if dropped:
        ids[1, 0] = ids[4, 1] = -1
    return ops.sort_by_expert(ids, E)


def _experts(x: Tensor, weight: Tensor, up: Tensor, down: Tensor, *metadata: Tensor) -> tuple[Tensor, Tensor]:
    return ops.expert_ffn(x, *metadata, weight, up, down, top_k=K)


def _gpt_oss(
    x: Tensor, weight: Tensor, up: Tensor, down: Tensor, b_up: Tensor, b_down: Tensor, *metadata: Tensor
) -> Any:
    options: dict[str, Any] = {"top_k": K, "clamp": (1.702, 0.8)}
    return ops.expert_ffn(x, *metadata, weight, up, down, b_up, b_down, **options)


def _experts_again(x: Tensor, weight: Tensor, up: Tensor, down: Tensor, bias: Tensor, *metadata: Tensor) -> Any:
    return ops.expert_ffn(x, *metadata, weight, up, down, bias, top_k=K, recompute=True)


def _attention(**options: Any) -> Callable[..., Any]:
    return partial(ops.attention, scale=0.7, **options)


def _router(**options: Any) -> Callable[..., Any]:
    return partial(ops.route, top_k=K, **options)


def _balance(function: Callable[..., Tensor], **options: Any) -> Callable[..., Tensor]:
    return lambda logits, ids, mask: function(logits, ids, mask, top_k=K, **options)


HEADS = ((2, 5, 4, 2), (2, 5, 2, 2), (2, 5, 2, 2))
EXPERTS = ((T, D), (T * K,), (E, 2 * F, D), (E, D, F))
FULL, DROPPED = _sorted(), _sorted(dropped=True)

CASES = [
    Case("embedding", lambda weight, ids: ops.embedding(ids, weight), ((V, D),), (torch.tensor([0, 6, 6, 1, 6]),)),
    Case("linear", ops.linear, ((T, D), (F, D), (F,))),
    Case("router_logits", ops.router_logits, ((T, D), (E, D), (E,))),
    Case("rms_norm", partial(ops.rms_norm, eps=1e-6), ((2, 5, 3, D), (D,))),
    Case("rope half", partial(ops.rope, theta=100.0, rotary_dim=4), ((2, 5, 2, 6),), (POSITIONS,)),
    Case("rope interleaved", partial(ops.rope, theta=100.0, interleaved=True), ((2, 5, 2, 4),), (POSITIONS,)),
    Case("attention", _attention(), HEADS),
    Case("attention documents", _attention(), HEADS, (DOCUMENTS,)),
    Case("attention window", _attention(document_ids=None, window=2), HEADS),
    Case("attention documents and window", _attention(window=2), HEADS, (DOCUMENTS,)),
    Case("add", partial(ops.add, alpha=0.5), ((T, D), (T, D))),
    Case("scale", partial(ops.scale, factor=3.0), ((T, D),)),
    Case("sigmoid", ops.sigmoid, ((T, 1),)),
    Case("sigmoid_gate", ops.sigmoid_gate, ((T, D), (T, 1))),
    Case("scaled_sum", ops.scaled_sum, ((T,), ())),
    Case("heads", lambda x: ops.merge_heads(ops.split_heads(x, 1, T, 2)), ((T, D),)),
    Case("swiglu", ops.swiglu, ((T, 2 * F),)),
    Case("swiglu_clamped", partial(ops.swiglu_clamped, alpha=1.702, limit=0.8), ((T, 2 * F),)),
    Case("add_bias", ops.add_bias, ((T, D), (D,))),
    Case("add_expert_bias", ops.add_expert_bias, ((T * K, D), (E, D)), FULL[2:]),
    Case("add_expert_bias with tail", ops.add_expert_bias, ((T * K, D), (E, D)), DROPPED[2:]),
    Case("scale_rows", ops.scale_rows, ((T, D), (T,))),
    Case("route softmax", _router(norm_kind="sum"), ((T, E),)),
    Case(
        "route sigmoid with bias", _router(score="sigmoid", norm_kind="sum", norm_eps=1e-20, scale=2.5), ((T, E), (E,))
    ),
    Case("route clamp", _router(norm_kind="sum", norm_mode="clamp", norm_eps=1e-12), ((T, E),)),
    Case("route softmax of selected", _router(score="none", weight_from="softmax_selected"), ((T, E),)),
    Case("route sigmoid of selected", _router(score="none", weight_from="sigmoid_selected"), ((T, E),)),
    Case("route groups", _router(score="sigmoid", groups=(3, 2, "top2_sum", "-inf")), ((T, E),)),
    Case("choose_experts", lambda s: ops.choose_experts(s, K), ((T, E),), differentiable=False),
    Case("sort_by_expert", lambda ids: ops.sort_by_expert(ids, E), (), (IDS,), differentiable=False),
    Case("permute", partial(ops.permute, top_k=K), ((T, D),), FULL),
    Case("permute with tail", partial(ops.permute, top_k=K), ((T, D),), DROPPED),
    Case("combine", partial(ops.combine, top_k=K), ((T * K, D),), FULL),
    Case("combine with tail", partial(ops.combine, top_k=K), ((T * K, D),), DROPPED),
    Case("gather_weights", ops.gather_weights, ((T, K),), FULL),
    Case("gather_weights with tail", ops.gather_weights, ((T, K),), DROPPED),
    Case("grouped_mm", ops.grouped_mm, ((T * K, D), (E, F, D)), FULL[2:]),
    Case("grouped_mm with tail", ops.grouped_mm, ((T * K, D), (E, F, D)), DROPPED[2:]),
    Case("expert_ffn", _experts, EXPERTS, FULL),
    Case("expert_ffn with tail", _experts, EXPERTS, DROPPED),
    Case("expert_ffn of gpt-oss", _gpt_oss, (*EXPERTS, (E, 2 * F), (E, D)), FULL),
    Case("expert_ffn of gpt-oss with tail", _gpt_oss, (*EXPERTS, (E, 2 * F), (E, D)), DROPPED),
    Case("expert_ffn computed again", _experts_again, (*EXPERTS, (E, 2 * F)), DROPPED),
    Case("expert_counts", lambda ids, mask: ops.expert_counts(ids, mask, E), (), (IDS, MASK), differentiable=False),
    Case("router_probabilities softmax", lambda x: ops.router_probabilities(x, "softmax"), ((T, E),)),
    Case("router_probabilities sigmoid", lambda x: ops.router_probabilities(x, "sigmoid"), ((T, E),)),
    Case("balance_sequence", _balance(ops.balance_sequence, score="sigmoid", sequences=5), ((T, E),), (IDS, MASK)),
    Case("balance_micro_batch", _balance(ops.balance_micro_batch, score="softmax", f_norm="k"), ((T, E),), (IDS, MASK)),
    Case("probability_sum", lambda x, mask: ops.probability_sum(x, mask, "softmax"), ((T, E),), (MASK,)),
    Case("z_loss", ops.z_loss, ((T, E),), (MASK,)),
    Case("router_entropy", lambda x, m: ops.router_entropy(x, m, "softmax"), ((T, E),), (MASK,), differentiable=False),
    Case("token_mask", ops.token_mask, (), (DOCUMENTS,), differentiable=False),
    Case("cross_entropy", ops.cross_entropy, ((T, V),), (LABELS,), outputs=(0, 1)),
]
