"""Quantising to FP8 in blocks, and the experts' halves made of such products."""

from __future__ import annotations

import pytest
import torch

from moegraph import ops
from moegraph.ops.block_experts import (
    fp8_block_dgrad_swiglu,
    fp8_block_dgrad_swiglu_quantized,
    fp8_block_up_swiglu,
    fp8_block_up_swiglu_quantized,
)
from moegraph.ops.block_mm import fp8_block_grouped_mm
from moegraph.ops.expert_ffn import activation_slopes, gated_gradient
from tests.kernels.cases import ragged, relative_error
from tests.kernels.scaled_cases import block_quantised, poisoned, square_quantised

CASE = ragged((0, 1, 31, 64), 9)
REAL = CASE.rows - CASE.tail


def test_a_block_of_a_row_is_a_row_of_its_own_and_rows_that_do_not_exist_are_zero() -> None:
    torch.manual_seed(0)
    x = poisoned(torch.randn(CASE.rows, 384).bfloat16() * torch.exp(torch.randn(CASE.rows, 384)).bfloat16(), REAL)
    x[3, 128:256] = 0
    data, scale = ops.fp8_quantize_blocks(x, CASE.offsets)
    want, want_scale = ops.fp8_quantize_rows(x[:REAL].unflatten(1, (3, 128)))
    assert torch.equal(data[:REAL].view(torch.uint8), want.flatten(1).view(torch.uint8))
    assert torch.equal(scale[:, :REAL], want_scale.t())
    assert not data[REAL:].view(torch.uint8).any()
    assert (scale[:, REAL:] == 1).all()


@pytest.mark.parametrize("n", [144, 256])
def test_a_square_of_a_weight_has_one_scale_and_a_transposed_weight_the_same_numbers(n: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(2, n, 256).bfloat16()
    weight[1, :128, :128] = 0
    data, scale = ops.fp8_quantize_blocks(weight)
    for e, i, j in ((0, 0, 0), (0, (n - 1) // 128, 1), (1, 0, 0), (1, 0, 1)):
        square = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
        want, want_scale = ops.fp8_quantize_rows(weight[e][square].reshape(1, -1))
        assert torch.equal(data[e][square].reshape(1, -1).view(torch.uint8), want.view(torch.uint8))
        assert scale[e, i, j] == want_scale
    if n % 128 == 0:
        turned, turned_scale = ops.fp8_quantize_blocks(weight.transpose(1, 2))
        assert torch.equal(turned.view(torch.uint8), data.transpose(1, 2).view(torch.uint8))
        assert torch.equal(turned_scale, scale.transpose(1, 2))


@pytest.mark.parametrize(("alpha", "limit"), [(0.0, 0.0), (1.7, 0.8)])
def test_the_experts_halves_are_a_product_and_a_pass_over_it(alpha: float, limit: float) -> None:
    torch.manual_seed(0)
    d, f, experts = 256, 128, len(CASE.sizes)
    x, up = block_quantised(torch.randn(CASE.rows, d)), square_quantised(torch.randn(experts, 2 * f, d))[:2]
    down = square_quantised(torch.randn(experts, f, d))[:2]
    bias, row_weight = torch.randn(experts, 2 * f).bfloat16(), torch.rand(CASE.rows)
    x = (poisoned(x[0], REAL), x[1])
    z, act = fp8_block_up_swiglu(*x, *up, CASE.offsets, bias, alpha, limit)
    assert torch.equal(z, fp8_block_grouped_mm(*x, *up, CASE.offsets, bias))
    assert relative_error(act, activation_slopes(z.double(), alpha, limit)[0]) < 3e-3
    rest = (poisoned(z, REAL), poisoned(row_weight, REAL), CASE.offsets, alpha, limit)
    have = fp8_block_dgrad_swiglu(*x, *down, *rest)
    da = fp8_block_grouped_mm(*x, *down, CASE.offsets).double()
    want = gated_gradient(da, z.double(), row_weight.double(), CASE.offsets, alpha, limit)
    for mine, true in zip(have, want, strict=True):
        assert relative_error(mine, true) < 3e-3
        assert not mine[REAL:].any()
    both = fp8_block_up_swiglu_quantized(*x, *up, CASE.offsets, bias, alpha, limit)
    alone = (z, *ops.fp8_quantize_blocks(act, CASE.offsets))
    gradients = fp8_block_dgrad_swiglu_quantized(*x, *down, *rest)
    apart = (*have, *ops.fp8_quantize_blocks(have[0], CASE.offsets))
    for a, b in zip((*both, *gradients), (*alone, *apart), strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_what_has_no_whole_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="96 columns are not whole blocks of 128"):
        ops.fp8_quantize_blocks(torch.randn(2, 128, 96))
    with pytest.raises(ValueError, match=r"\[8, 128\] is not weights \[E, N, K\]"):
        ops.fp8_quantize_blocks(torch.randn(8, 128))
    with pytest.raises(ValueError, match=r"is not rows \[R, K\] with offsets"):
        ops.fp8_quantize_blocks(torch.randn(1, 8, 128), CASE.offsets)
