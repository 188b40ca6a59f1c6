"""Operators of the layer graph: the callables its nodes call, the gradients they turn into, and facts about both.

Every operator is functional, its output shape depends on shapes only, and it traces alike on every device. Those with
a loop, a sort or a fused kernel inside are `torch.library` operators in the namespace `moegraph`, with a fake kernel,
a plain-torch implementation that is also the reference, and a gradient made of operators; the rest are plain
functional aten.

Legend: T tokens = B·S, B sequences, S sequence length, D model width, F expert width, E experts, K top-k,
R routed rows = T·K, V vocabulary, H heads, Dh head width.
"""

from __future__ import annotations

# Operators of step graphs only, in modules of their own; importing registers them.
from moegraph.ops import block_experts as block_experts
from moegraph.ops import block_mm as block_mm
from moegraph.ops import mx_linear as mx_linear
from moegraph.ops import mx_linear_wgrad as mx_linear_wgrad
from moegraph.ops import mx_mm as mx_mm
from moegraph.ops import mx_wgrad as mx_wgrad
from moegraph.ops import scaled_mm as scaled_mm
from moegraph.ops import swiglu_quantize as swiglu_quantize
from moegraph.ops.attention import attention, attention_backward
from moegraph.ops.attention_cuda import attention_backend
from moegraph.ops.balance import (
    balance_micro_batch,
    balance_sequence,
    probability_sum,
    router_entropy,
    z_loss,
)
from moegraph.ops.cross_entropy import cross_entropy, cross_entropy_backward
from moegraph.ops.direct import direct_dispatch, direct_put, direct_return, direct_take
from moegraph.ops.direct_plan import counts_for_ranks, direct_plan, row_numbers
from moegraph.ops.dispatch import (
    as_column,
    bucket_capacity,
    count_dropped,
    drop_overflow,
    expert_counts_to_send,
    overflow,
    pack_rows,
    received_experts,
    rows_per_rank,
    unpack_rows,
)
from moegraph.ops.embedding import embedding, embedding_wgrad, embedding_wgrad_add
from moegraph.ops.exchange import EXPERT_GROUP, all_to_all_start, all_to_all_wait, exact_exchange
from moegraph.ops.expert_bias import add_bias, add_expert_bias, expert_bias_wgrad
from moegraph.ops.expert_ffn import expert_ffn, expert_ffn_dgrad
from moegraph.ops.flops import flops
from moegraph.ops.grouped_mm import (
    grouped_mm,
    grouped_mm_backend,
    grouped_mm_dgrad,
    grouped_mm_wgrad,
    grouped_mm_wgrad_add,
)
from moegraph.ops.linear import linear, router_logits
from moegraph.ops.linear_wgrad import linear_wgrad_add
from moegraph.ops.mx_format import mx_dequantize, mx_quantize
from moegraph.ops.mx_payload import mx_decode, mx_encode, mx_split
from moegraph.ops.norm import rms_norm
from moegraph.ops.permute import combine, gather_weights, gather_weights_backward, permute, sort_by_expert
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
from moegraph.ops.registry import (
    ACCUMULATIONS,
    ADDING,
    COMMUNICATION,
    NEVER_RECOMPUTE,
    OPERATORS,
    SCALED_PRODUCTS,
    WEIGHT_GRADIENTS,
    Facts,
)
from moegraph.ops.rotary import rope
from moegraph.ops.routing import choose_experts, expert_counts, expert_scores, route, router_probabilities
from moegraph.ops.tokens import join_tokens, scaled_sum, sigmoid_gate, split_tokens, token_mask

__all__ = [
    "ACCUMULATIONS",
    "ADDING",
    "COMMUNICATION",
    "EXPERT_GROUP",
    "NEVER_RECOMPUTE",
    "OPERATORS",
    "SCALED_PRODUCTS",
    "WEIGHT_GRADIENTS",
    "Facts",
    "add",
    "add_bias",
    "add_expert_bias",
    "all_to_all_start",
    "all_to_all_wait",
    "as_column",
    "attention",
    "attention_backend",
    "attention_backward",
    "balance_micro_batch",
    "balance_sequence",
    "bucket_capacity",
    "choose_experts",
    "combine",
    "count_dropped",
    "counts_for_ranks",
    "cross_entropy",
    "cross_entropy_backward",
    "direct_dispatch",
    "direct_plan",
    "direct_put",
    "direct_return",
    "direct_take",
    "drop_overflow",
    "embedding",
    "embedding_wgrad",
    "embedding_wgrad_add",
    "exact_exchange",
    "expert_bias_wgrad",
    "expert_counts",
    "expert_counts_to_send",
    "expert_ffn",
    "expert_ffn_dgrad",
    "expert_scores",
    "flops",
    "fp8_permute_quantize",
    "fp8_permute_quantize_blocks",
    "fp8_quantize_blocks",
    "fp8_quantize_columns_t",
    "fp8_quantize_rows",
    "gather_weights",
    "gather_weights_backward",
    "grouped_mm",
    "grouped_mm_backend",
    "grouped_mm_dgrad",
    "grouped_mm_wgrad",
    "grouped_mm_wgrad_add",
    "join_tokens",
    "linear",
    "linear_wgrad_add",
    "merge_heads",
    "mx_decode",
    "mx_dequantize",
    "mx_dequantize_rows",
    "mx_encode",
    "mx_permute_quantize",
    "mx_quantize",
    "mx_quantize_both",
    "mx_quantize_columns",
    "mx_quantize_ragged_both",
    "mx_quantize_ragged_columns",
    "mx_quantize_rows",
    "mx_split",
    "overflow",
    "pack_rows",
    "permute",
    "probability_sum",
    "received_experts",
    "rms_norm",
    "rope",
    "route",
    "router_entropy",
    "router_logits",
    "router_probabilities",
    "row_numbers",
    "rows_per_rank",
    "scale",
    "scale_rows",
    "scaled_sum",
    "sigmoid",
    "sigmoid_gate",
    "sort_by_expert",
    "split_heads",
    "split_tokens",
    "swiglu",
    "swiglu_clamped",
    "token_mask",
    "unpack_rows",
    "z_loss",
]
