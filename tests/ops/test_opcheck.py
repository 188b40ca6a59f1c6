"""`torch.library.opcheck` on every registered operator: schema, fake kernel, autograd registration, AOT dispatch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moegraph import ops
from moegraph.benchmarks import balanced_routing as balanced_routing  # registers its operator
from moegraph.ops.exchange import simulated

from .op_cases import DOCUMENTS, DROPPED, HEADS, IDS, LABELS, D, E, F, K, T, V
from .scaled_calls import CHECKS, scaled_calls

mg = torch.ops.moegraph
ORDER, INVERSE, OFFSETS = DROPPED
ALL = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
NO_GRADIENT = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")


def floats(*shapes: tuple[int, ...], grad: bool = False) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(s, generator=generator).requires_grad_(grad) for s in shapes]


def attention_backward_arguments() -> tuple[Any, ...]:
    q, k, v, grad = floats(*HEADS, HEADS[0])
    out, lse = ops.attention(q, k, v, DOCUMENTS, window=2, scale=0.5)
    return grad, q, k, v, out, lse, DOCUMENTS, 2, 0.5


def cross_entropy_backward_arguments() -> tuple[Any, ...]:
    (logits,) = floats((T, V))
    loss, lse = ops.cross_entropy(logits, LABELS)
    return torch.ones_like(loss), None, logits, LABELS, lse


def experts() -> tuple[Any, ...]:
    x, row_weight, w_up, w_down = floats((T, D), (T * K,), (E, 2 * F, D), (E, D, F), grad=True)
    b_up, b_down = floats((E, 2 * F), (E, D), grad=True)
    return x, *DROPPED, row_weight, w_up, w_down, b_up, b_down, K, 1.7, 0.8


def experts_backward_arguments() -> tuple[Any, ...]:
    grad, z, row_weight, w_down = floats((T * K, D), (T * K, 2 * F), (T * K,), (E, D, F))
    return grad, z, row_weight, w_down, OFFSETS, 0.0, 0.0


class Alone:
    """A group of one rank."""

    def all_to_all(self, x: torch.Tensor, receive: Any, send: Any, group: str) -> torch.Tensor:
        return x.clone()


def plan_arguments(room: int) -> tuple[Any, ...]:
    """inverse, offsets, counts and room of a group of one rank."""
    return INVERSE, OFFSETS, ops.counts_for_ranks(OFFSETS, 1), room


def direct_metadata(room: int = T * K) -> tuple[torch.Tensor, ...]:
    """origin, destination, local offsets and counts of a dispatch from one rank to itself."""
    arguments = plan_arguments(room)
    destination, local, _ = ops.direct_plan(*arguments)
    where = (destination, local, arguments[2])
    with simulated(Alone()):
        origin = ops.direct_dispatch(*floats((T, D), (T, K)), *where, room, "ep")[2]
    return origin, *where


def payload_and_rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Of a weight gradient: a payload [R, 64] and rows [R, D] in bf16."""
    return ops.mx_encode(*floats((ROWS, 64))), floats((ROWS, D))[0].bfloat16()


ROWS, BUCKET = T * K, torch.tensor([3], dtype=torch.int32)
DIRECT = direct_metadata()
CALLS: dict[str, tuple[Any, tuple[Any, ...], tuple[str, ...]]] = {
    "embedding": (mg.embedding, (torch.tensor([0, 6, 6]), *floats((V, D), grad=True)), ALL),
    "embedding_wgrad": (mg.embedding_wgrad, (*floats((3, D)), torch.tensor([0, 6, 6]), V), NO_GRADIENT),
    "attention": (mg.attention, (*floats(*HEADS, grad=True), DOCUMENTS, 2, 0.5), ALL),
    "attention_backward": (mg.attention_backward, attention_backward_arguments(), NO_GRADIENT),
    "balanced_choice": (mg.balanced_choice, (*floats((T, E)), K), NO_GRADIENT),
    "choose_experts": (mg.choose_experts, (*floats((T, E)), K), NO_GRADIENT),
    "sort_by_expert": (mg.sort_by_expert, (IDS, E), NO_GRADIENT),
    "permute": (mg.permute, (*floats((T, D), grad=True), *DROPPED, K), ALL),
    "combine": (mg.combine, (*floats((T * K, D), grad=True), *DROPPED, K), ALL),
    "gather_weights": (mg.gather_weights, (*floats((T, K), grad=True), *DROPPED), ALL),
    "gather_weights_backward": (mg.gather_weights_backward, (*floats((T * K,)), INVERSE, OFFSETS, K), NO_GRADIENT),
    "grouped_mm": (mg.grouped_mm, (*floats((T * K, D), (E, F, D), grad=True), OFFSETS), ALL),
    "grouped_mm_dgrad": (mg.grouped_mm_dgrad, (*floats((T * K, F), (E, F, D)), OFFSETS), NO_GRADIENT),
    "grouped_mm_wgrad": (mg.grouped_mm_wgrad, (*floats((T * K, F), (T * K, D)), OFFSETS), NO_GRADIENT),
    "grouped_mm_wgrad_add": (
        mg.grouped_mm_wgrad_add,
        (*floats((E, 3, D)), torch.ones(1, dtype=torch.int32), *floats((ROWS, 3), (ROWS, D)), OFFSETS),
        NO_GRADIENT,
    ),
    "linear_wgrad_add": (
        mg.linear_wgrad_add,
        (*floats((F, D)), torch.ones(1, dtype=torch.int32), *floats((T, F), (T, D))),
        NO_GRADIENT,
    ),
    "embedding_wgrad_add": (
        mg.embedding_wgrad_add,
        (*floats((9, D)), torch.zeros(1, dtype=torch.int32), *floats((T, D)), torch.arange(T) % 9, 9),
        NO_GRADIENT,
    ),
    "expert_ffn": (mg.expert_ffn, (*experts(), False), ALL),
    "expert_ffn_dgrad": (mg.expert_ffn_dgrad, experts_backward_arguments(), NO_GRADIENT),
    "expert_bias_wgrad": (mg.expert_bias_wgrad, (*floats((T * K, D)), OFFSETS), NO_GRADIENT),
    "pack_rows": (mg.pack_rows, (*floats((ROWS, D), grad=True), OFFSETS, 1, 4), ALL),
    "unpack_rows": (mg.unpack_rows, (*floats((4, D), grad=True), OFFSETS, 1, ROWS), ALL),
    "exact_exchange": (mg.exact_exchange, (*floats((4, D), grad=True), BUCKET, BUCKET, "ep"), ALL),
    "direct_plan": (mg.direct_plan, plan_arguments(4), NO_GRADIENT),
    "direct_dispatch": (mg.direct_dispatch, (*floats((T, D), (T, K), grad=True), *DIRECT[1:], ROWS, "ep"), ALL),
    "direct_return": (mg.direct_return, (*floats((ROWS, D), grad=True), *DIRECT, K, "ep"), ALL),
    "direct_put": (mg.direct_put, (*floats((T, D)), *DIRECT[1:], ROWS, "ep"), NO_GRADIENT),
    "direct_take": (mg.direct_take, (*floats((ROWS, D), (ROWS,)), *DIRECT, K, "ep"), NO_GRADIENT),
    "mx_quantize_rows": (mg.mx_quantize_rows, (*floats((ROWS, 64)), OFFSETS, True), NO_GRADIENT),
    "mx_dequantize_rows": (mg.mx_dequantize_rows, ops.mx_quantize_rows(*floats((ROWS, 64))), CHECKS),
    "mx_quantize_columns": (mg.mx_quantize_columns, (*floats((E, 64, D)), False), NO_GRADIENT),
    "mx_quantize_ragged_columns": (mg.mx_quantize_ragged_columns, (*floats((ROWS, D)), OFFSETS, True), NO_GRADIENT),
    "mx_quantize_both": (mg.mx_quantize_both, (*floats((E, 64, 32)), True), NO_GRADIENT),
    "mx_quantize_ragged_both": (mg.mx_quantize_ragged_both, (*floats((ROWS, 32)), OFFSETS, False), NO_GRADIENT),
    "fp8_quantize_rows": (mg.fp8_quantize_rows, (*floats((ROWS, D)), OFFSETS), NO_GRADIENT),
    "fp8_quantize_columns_t": (mg.fp8_quantize_columns_t, (*floats((ROWS, D)), OFFSETS), NO_GRADIENT),
    "mx_permute_quantize": (mg.mx_permute_quantize, (*floats((T, 64)), *DROPPED, K, True), NO_GRADIENT),
    "fp8_permute_quantize": (mg.fp8_permute_quantize, (*floats((T, D)), *DROPPED, K), NO_GRADIENT),
    "fp8_permute_quantize_blocks": (
        mg.fp8_permute_quantize_blocks,
        (*floats((T, 128)), *DROPPED, K),
        NO_GRADIENT,
    ),
    "mx_encode": (mg.mx_encode, (*floats((T, 64)),), NO_GRADIENT),
    "mx_decode": (mg.mx_decode, (ops.mx_encode(*floats((T, 64))),), NO_GRADIENT),
    "payload_grouped_mm_wgrad": (
        mg.payload_grouped_mm_wgrad,
        (ops.mx_encode(*floats((ROWS, 64))), ops.mx_encode(*floats((ROWS, 32))), OFFSETS),
        NO_GRADIENT,
    ),
    "payload_grouped_mm_wgrad_add": (
        mg.payload_grouped_mm_wgrad_add,
        (*floats((E, 64, D)), torch.ones(1, dtype=torch.int32), *payload_and_rows(), OFFSETS),
        NO_GRADIENT,
    ),
    "mx_split": (mg.mx_split, (ops.mx_encode(*floats((ROWS, 64))), OFFSETS), NO_GRADIENT),
    **scaled_calls(),
    "cross_entropy": (mg.cross_entropy, (*floats((T, V), grad=True), LABELS), ALL),
    "cross_entropy_backward": (mg.cross_entropy_backward, cross_entropy_backward_arguments(), NO_GRADIENT),
}


@pytest.mark.parametrize("name", CALLS)
def test_registration(name: str) -> None:
    op, arguments, utilities = CALLS[name]
    with simulated(Alone()):
        torch.library.opcheck(op.default, arguments, test_utils=utilities)


def test_every_registered_operator_is_checked() -> None:
    registered = torch._C._dispatch_get_all_op_names()
    assert {name.removeprefix("moegraph::") for name in registered if name.startswith("moegraph::")} == set(CALLS)
