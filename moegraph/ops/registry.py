"""Facts about the operators that passes and verifiers ask for.

`OPERATORS` describes the layer-graph callables; `WEIGHT_GRADIENTS`, `ACCUMULATIONS`, `NEVER_RECOMPUTE` and
`SCALED_PRODUCTS` hold operator overloads as they stand in a step graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from moegraph.ops import block_experts as block_experts
from moegraph.ops import linear_wgrad as linear_wgrad  # registers what ADDING names
from moegraph.ops import mx_linear as mx_linear  # these register what WEIGHT_GRADIENTS and SCALED_PRODUCTS name
from moegraph.ops import mx_linear_wgrad as mx_linear_wgrad
from moegraph.ops import mx_mm as mx_mm
from moegraph.ops import mx_quantized_mm as mx_quantized_mm  # registers MXFP8's products, with those of mx_mm
from moegraph.ops import mx_wgrad as mx_wgrad
from moegraph.ops import payload_wgrad as payload_wgrad
from moegraph.ops import scaled_mm as scaled_mm  # registers what WEIGHT_GRADIENTS names
from moegraph.ops import swiglu_quantize as swiglu_quantize  # registers activations that are quantised as well
from moegraph.ops.attention import attention
from moegraph.ops.balance import (
    balance_micro_batch,
    balance_sequence,
    probability_sum,
    router_entropy,
    z_loss,
)
from moegraph.ops.cross_entropy import cross_entropy
from moegraph.ops.direct import direct_dispatch, direct_return
from moegraph.ops.direct_plan import counts_for_ranks, direct_plan, row_numbers
from moegraph.ops.dispatch import (
    as_column,
    count_dropped,
    drop_overflow,
    expert_counts_to_send,
    overflow,
    pack_rows,
    received_experts,
    rows_per_rank,
    unpack_rows,
)
from moegraph.ops.embedding import embedding
from moegraph.ops.exchange import all_to_all_start, all_to_all_wait, exact_exchange
from moegraph.ops.expert_bias import add_bias, add_expert_bias
from moegraph.ops.expert_ffn import expert_ffn
from moegraph.ops.grouped_mm import grouped_mm
from moegraph.ops.linear import linear, router_logits
from moegraph.ops.mx_payload import mx_decode, mx_encode, mx_split
from moegraph.ops.norm import rms_norm
from moegraph.ops.permute import combine, gather_weights, permute, sort_by_expert
from moegraph.ops.permute_quantize import fp8_permute_quantize, fp8_permute_quantize_blocks, mx_permute_quantize
from moegraph.ops.pointwise import add, merge_heads, scale, scale_rows, sigmoid, split_heads, swiglu, swiglu_clamped
from moegraph.ops.quantize import (
    mx_dequantize_rows,
    mx_quantize_both,
    mx_quantize_columns,
    mx_quantize_ragged_both,
    mx_quantize_ragged_columns,
    mx_quantize_rows,
)
from moegraph.ops.quantize_blocks import fp8_quantize_blocks
from moegraph.ops.quantize_fp8 import fp8_quantize_columns_t, fp8_quantize_rows
from moegraph.ops.rotary import rope
from moegraph.ops.routing import choose_experts, expert_counts, expert_scores, route, router_probabilities
from moegraph.ops.tokens import join_tokens, scaled_sum, sigmoid_gate, split_tokens, token_mask

_mg = torch.ops.moegraph

# Nothing but a parameter's gradient depends on these, so a schedule may put them off. The weight gradients of
# `linear` and `router_logits` are plain aten.mm at first and are found by what depends on them.
WEIGHT_GRADIENTS: frozenset[Any] = frozenset(
    {
        _mg.embedding_wgrad.default,
        _mg.grouped_mm_wgrad.default,
        _mg.fp8_grouped_mm_wgrad.default,
        _mg.mx_grouped_mm_wgrad.default,
        _mg.payload_grouped_mm_wgrad.default,
        _mg.mx_linear_wgrad.default,
        _mg.expert_bias_wgrad.default,
    }
)

# Weight gradients and what adds each straight to a gradient buffer: (buffer!, keep, *arguments).
ACCUMULATIONS: dict[Any, Any] = {
    _mg.grouped_mm_wgrad.default: _mg.grouped_mm_wgrad_add.default,
    _mg.payload_grouped_mm_wgrad.default: _mg.payload_grouped_mm_wgrad_add.default,
    _mg.embedding_wgrad.default: _mg.embedding_wgrad_add.default,
}

# The only operators in a graph that write to an argument, their first one: those, and what does it for linear layers.
ADDING: frozenset[Any] = frozenset({*ACCUMULATIONS.values(), _mg.linear_wgrad_add.default})

# The choice of experts and the rows it leads to: computed again, a tie could fall differently, and under expert
# parallelism a collective would run twice.
NEVER_RECOMPUTE: frozenset[Any] = frozenset(
    {_mg.choose_experts.default, _mg.sort_by_expert.default, _mg.permute.default, _mg.direct_plan.default}
)

# Forward products on 8-bit operands. Casts put them in, so that no callable of the layer graph has them.
SCALED_PRODUCTS: frozenset[Any] = frozenset(
    {
        _mg.mx_grouped_mm.default,
        _mg.mx_up_swiglu.default,
        _mg.mx_up_swiglu_quantized.default,
        _mg.mx_up_swiglu_saved.default,
        _mg.fp8_grouped_mm.default,
        _mg.fp8_up_swiglu.default,
        _mg.mx_linear.default,
        _mg.fp8_block_grouped_mm.default,
        _mg.fp8_block_up_swiglu.default,
        _mg.fp8_block_up_swiglu_quantized.default,
    }
)

# Layer-graph callables that talk to other ranks; in a step graph they are collectives or registered operators.
COMMUNICATION: frozenset[Callable[..., Any]] = frozenset(
    {all_to_all_start, all_to_all_wait, exact_exchange, direct_dispatch, direct_return}
)


@dataclass(frozen=True, slots=True)
class Facts:
    """What a layer-graph callable costs and turns into.

    cost: "matmul" (compute bound), "gather" (memory bound, opaque to the compiler) or "pointwise" (fused, cheap to
    compute again). overloads: the moegraph operators it puts into a step graph, forward and backward.
    """

    cost: str
    overloads: tuple[Any, ...] = ()


OPERATORS: dict[Callable[..., Any], Facts] = {
    embedding: Facts("gather", (_mg.embedding.default, _mg.embedding_wgrad.default)),
    linear: Facts("matmul"),
    router_logits: Facts("matmul"),
    rms_norm: Facts("pointwise"),
    rope: Facts("pointwise"),
    attention: Facts("matmul", (_mg.attention.default, _mg.attention_backward.default)),
    add: Facts("pointwise"),
    scale: Facts("pointwise"),
    sigmoid: Facts("pointwise"),
    split_heads: Facts("pointwise"),
    merge_heads: Facts("pointwise"),
    swiglu: Facts("pointwise"),
    swiglu_clamped: Facts("pointwise"),
    add_bias: Facts("pointwise"),
    add_expert_bias: Facts("pointwise", (_mg.expert_bias_wgrad.default,)),
    sigmoid_gate: Facts("pointwise"),
    token_mask: Facts("pointwise"),
    scaled_sum: Facts("pointwise"),
    split_tokens: Facts("pointwise"),
    join_tokens: Facts("gather"),
    scale_rows: Facts("pointwise"),
    choose_experts: Facts("gather", (_mg.choose_experts.default,)),
    expert_scores: Facts("pointwise"),
    route: Facts("pointwise", (_mg.choose_experts.default,)),
    expert_counts: Facts("pointwise"),
    router_probabilities: Facts("pointwise"),
    sort_by_expert: Facts("gather", (_mg.sort_by_expert.default,)),
    permute: Facts("gather", (_mg.permute.default, _mg.combine.default)),
    gather_weights: Facts("gather", (_mg.gather_weights.default, _mg.gather_weights_backward.default)),
    combine: Facts("gather", (_mg.combine.default, _mg.permute.default)),
    expert_ffn: Facts(
        "matmul",
        (
            _mg.expert_ffn.default,
            _mg.expert_ffn_dgrad.default,
            _mg.grouped_mm_dgrad.default,
            _mg.grouped_mm_wgrad.default,
            _mg.permute.default,
            _mg.combine.default,
        ),
    ),
    grouped_mm: Facts("matmul", (_mg.grouped_mm.default, _mg.grouped_mm_dgrad.default, _mg.grouped_mm_wgrad.default)),
    expert_counts_to_send: Facts("pointwise"),
    rows_per_rank: Facts("pointwise"),
    overflow: Facts("pointwise"),
    received_experts: Facts("pointwise"),
    as_column: Facts("pointwise"),
    drop_overflow: Facts("gather"),
    count_dropped: Facts("pointwise"),
    pack_rows: Facts("gather", (_mg.pack_rows.default, _mg.unpack_rows.default)),
    unpack_rows: Facts("gather", (_mg.unpack_rows.default, _mg.pack_rows.default)),
    all_to_all_start: Facts("gather"),
    all_to_all_wait: Facts("gather"),
    exact_exchange: Facts("gather", (_mg.exact_exchange.default,)),
    counts_for_ranks: Facts("pointwise"),
    direct_plan: Facts("gather", (_mg.direct_plan.default,)),
    row_numbers: Facts("pointwise"),
    direct_dispatch: Facts("gather", (_mg.direct_dispatch.default, _mg.direct_take.default)),
    direct_return: Facts("gather", (_mg.direct_return.default, _mg.direct_put.default)),
    mx_dequantize_rows: Facts("gather", (_mg.mx_dequantize_rows.default,)),
    mx_quantize_rows: Facts("gather", (_mg.mx_quantize_rows.default,)),
    mx_quantize_columns: Facts("gather", (_mg.mx_quantize_columns.default,)),
    mx_quantize_ragged_columns: Facts("gather", (_mg.mx_quantize_ragged_columns.default,)),
    mx_quantize_both: Facts("gather", (_mg.mx_quantize_both.default,)),
    mx_quantize_ragged_both: Facts("gather", (_mg.mx_quantize_ragged_both.default,)),
    fp8_quantize_rows: Facts("gather", (_mg.fp8_quantize_rows.default,)),
    mx_encode: Facts("gather", (_mg.mx_encode.default,)),
    mx_split: Facts("gather", (_mg.mx_split.default,)),
    mx_decode: Facts("pointwise", (_mg.mx_decode.default,)),
    fp8_quantize_blocks: Facts("gather", (_mg.fp8_quantize_blocks.default,)),
    fp8_quantize_columns_t: Facts("gather", (_mg.fp8_quantize_columns_t.default,)),
    mx_permute_quantize: Facts("gather", (_mg.mx_permute_quantize.default,)),
    fp8_permute_quantize: Facts("gather", (_mg.fp8_permute_quantize.default,)),
    fp8_permute_quantize_blocks: Facts("gather", (_mg.fp8_permute_quantize_blocks.default,)),
    balance_sequence: Facts("pointwise"),
    balance_micro_batch: Facts("pointwise"),
    probability_sum: Facts("pointwise"),
    z_loss: Facts("pointwise"),
    router_entropy: Facts("pointwise"),
    cross_entropy: Facts("gather", (_mg.cross_entropy.default, _mg.cross_entropy_backward.default)),
}
