"""Operations counted from shapes equal a count by hand, and ignore experts that are not visited."""

from __future__ import annotations

import pytest
import torch

from moegraph import ops
from moegraph.ops.flops import visible_keys


@pytest.mark.parametrize(("length", "window"), [(1, None), (7, None), (7, 3), (7, 1), (7, 100)])
def test_visible_keys_equals_the_mask(length: int, window: int | None) -> None:
    distance = torch.arange(length)[:, None] - torch.arange(length)
    mask = (distance >= 0) & (distance < (window or length))
    assert visible_keys(length, window) == int(mask.sum())


def test_linear_and_router_count_two_per_multiply_add() -> None:
    x, weight = torch.empty(5, 4, device="meta"), torch.empty(3, 4, device="meta")
    assert ops.flops(ops.linear, (x, weight, None)) == 2 * 5 * 4 * 3
    assert ops.flops(ops.router_logits, (x, weight)) == 2 * 5 * 4 * 3


def test_attention_counts_scores_and_values_for_every_query_head() -> None:
    q, k = torch.empty(2, 7, 4, 8, device="meta"), torch.empty(2, 7, 2, 8, device="meta")
    assert ops.flops(ops.attention, (q, k, k), {"window": 3}) == 2 * (2 * 2 * 4 * 8) * (1 + 2 + 3 * 5)


@pytest.mark.parametrize("experts", [8, 128])
def test_a43_grouped_product_counts_active_rows_whatever_the_number_of_experts(experts: int) -> None:
    tokens, top_k, d_model, d_ff = 16, 2, 32, 24
    rows = torch.empty(tokens * top_k, d_model, device="meta")
    weight = torch.empty(experts, 2 * d_ff, d_model, device="meta")
    offsets = torch.empty(experts, dtype=torch.int32, device="meta")
    assert ops.flops(ops.grouped_mm, (rows, weight, offsets)) == 2 * tokens * top_k * d_model * 2 * d_ff


def test_pointwise_operators_cost_nothing() -> None:
    assert ops.flops(ops.rms_norm, (torch.empty(3, 4), torch.empty(4), 1e-6)) == 0
