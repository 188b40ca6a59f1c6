"""MXFP8 weight gradients and linear layers in the interpreter, with the `dot_scaled` of test_mx.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moegraph import ops
from moegraph.kernels import mx_quantize, mx_rows_gemm, mx_wgrad
from moegraph.ops.mx_linear_wgrad import mx_quantize_tokens
from moegraph.ops.mx_scales import swizzle_column_scales, swizzle_scales
from tests.kernels.cases import Ragged, ragged, relative_error
from tests.kernels.interpreted.test_mx import BOUND, SMALL
from tests.kernels.interpreted.test_mx import dot_scaled as dot_scaled  # a fixture for every test
from tests.kernels.quantize_cases import mismatch
from tests.kernels.scaled_cases import mx_quantised, mx_restored, poisoned


def test_a_linear_layer_is_the_product_of_one_expert_with_the_scales_of_plain_matrices() -> None:
    """As `mx_linear` calls it: the scales of its rows have no block to spare for another expert."""
    torch.manual_seed(0)
    (x, x_scale), (weight, weight_scale) = mx_quantised(torch.randn(200, 288)), mx_quantised(torch.randn(144, 288))
    bias, offsets = torch.randn(1, 144).bfloat16(), torch.tensor([200], dtype=torch.int32)
    operands = (x, swizzle_scales(x_scale), weight[None], swizzle_scales(weight_scale)[None], offsets)
    have = mx_rows_gemm.mx_grouped_mm(*operands, bias=bias, config=replace(SMALL, block_n=256, parts=2))
    want = mx_restored(x, x_scale) @ mx_restored(weight, weight_scale).t() + bias.double()
    assert relative_error(have, want) < BOUND


@pytest.mark.parametrize(
    ("case", "n", "k", "parts", "block_n"),
    [
        pytest.param(ragged((1, 0, 129), 9), 144, 288, 2, 256, id="more than a block of scales"),
        pytest.param(ragged((0, 127, 128), 0), 128, 128, 1, 128, id="whole blocks"),
        pytest.param(ragged((0, 0), 9), 128, 128, 1, 128, id="no rows"),
    ],
)
def test_the_weight_gradient(case: Ragged, n: int, k: int, parts: int, block_n: int) -> None:
    """Behind the last run lies NaN, data and scales; rows that do not exist were NaN when they were quantised."""
    torch.manual_seed(0)
    real, operands, values = case.rows - case.tail, list[Tensor](), list[Tensor]()
    for width in (n, k):
        x = torch.randn(case.rows, width) * torch.exp(torch.randn(case.rows, width))
        data, scale, ends = ops.mx_quantize_ragged_columns(poisoned(x, real), case.offsets)
        values.append(ops.mx_dequantize(data, scale, torch.float32, -2).double())
        swizzled, last = swizzle_column_scales(scale, case.offsets), int(ends[-1])
        data.view(torch.uint8)[last:] = 0x7F
        swizzled.view(-1, 512)[last // 128 * -(-width // 128) :] = 255
        operands += [data, swizzled]
    have = mx_wgrad.mx_wgrad(*operands, ends, config=replace(SMALL, block_n=block_n, parts=parts))
    start = 0
    for mine, end in zip(have, ends.tolist(), strict=True):
        assert relative_error(mine, values[0][start:end].t() @ values[1][start:end]) < BOUND
        start = end


@pytest.mark.parametrize("tokens", [pytest.param(50, marks=pytest.mark.slow), 200])
def test_the_weight_gradient_of_a_linear_layer(tokens: int) -> None:
    """As `mx_linear_wgrad` calls it: the run ends with a block of 128 tokens, of which the last are not there."""
    torch.manual_seed(0)
    operands, values = list[Tensor](), list[Tensor]()
    for width in (144, 160):
        x = torch.randn(tokens, width) * torch.exp(torch.randn(tokens, 1))
        data, scale = mx_quantize_tokens(x, True)
        made = mx_quantize.mx_quantize(x, rows=False, columns=True, swizzled=True)
        plain = mx_quantize.mx_quantize(x, rows=False, columns=True)
        for have, want in zip((*made[2:], *plain[2:]), (data, scale, *mx_quantize_tokens(x, False)), strict=True):
            assert have is not None
            assert mismatch(have, want) == ""
        operands += [data, scale]
        padded = torch.nn.functional.pad(x, (0, 0, 0, -tokens % 32))
        values.append(ops.mx_dequantize(*ops.mx_quantize(padded, -2), torch.float32, -2).double())
    ends = torch.tensor([-(-tokens // 128) * 128], dtype=torch.int32)
    (have,) = mx_wgrad.mx_wgrad(*operands, ends, config=replace(SMALL, block_n=256, parts=2))
    assert relative_error(have, values[0].t() @ values[1]) < BOUND


def test_tiles_that_are_not_whole_blocks_of_scales_are_refused() -> None:
    data, scale = torch.zeros(128, 128).to(torch.float8_e4m3fn), torch.zeros(128, 4, dtype=torch.uint8)
    offsets = torch.tensor([128], dtype=torch.int32)
    with pytest.raises(ValueError, match="is not whole blocks of scales"):
        mx_wgrad.mx_wgrad(data, scale, data, scale, offsets, config=replace(SMALL, block_m=256))
