"""On a GPU, through the operators: experts' halves of FP8 operands in blocks, linear layers and weight gradients in
MXFP8; as in test_scaled_cuda.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moegraph import ops
from moegraph.ops import block_experts, mx_linear, mx_wgrad
from moegraph.ops.expert_ffn import activation_slopes, gated_gradient
from moegraph.ops.mx_scales import swizzle_column_scales, swizzle_scales
from tests.kernels.cases import ragged
from tests.kernels.scaled_cases import (
    block_quantised,
    block_restored,
    grouped64,
    mx_quantised,
    mx_restored,
    poisoned,
    square_quantised,
)
from tests.kernels.test_scaled_cuda import BOUND, SIZES, close, made

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("alpha", "limit"), [(0.0, 0.0), (1.7, 0.8)])
def test_the_experts_halves_of_operands_in_blocks(sizes: tuple[int, ...], alpha: float, limit: float) -> None:
    case, d, f = ragged(sizes, 37, "cuda"), 512, 384
    real, (rows, up) = case.rows - case.tail, made(case, d, 2 * f)
    left, (weight, weight_scale, values) = block_quantised(rows), square_quantised(up)
    bias, row_weight = torch.randn(len(sizes), 2 * f, device="cuda").bfloat16(), torch.rand(case.rows, device="cuda")
    operands = (poisoned(left[0], real), left[1], weight, weight_scale, case.offsets)
    want = grouped64(block_restored(*left), values, case)
    want[:real] += bias[case.expert_of_row].double()
    z, act = block_experts.fp8_block_up_swiglu(*operands, bias, alpha, limit)
    close(z, want, BOUND[True])
    close(act, activation_slopes(z.double(), alpha, limit)[0], BOUND[True])
    down, down_scale, values = square_quantised(torch.randn(len(sizes), f, d, device="cuda"))
    rest = (poisoned(z, real), poisoned(row_weight, real), case.offsets, alpha, limit)
    have = block_experts.fp8_block_dgrad_swiglu(operands[0], left[1], down, down_scale, *rest)
    da = grouped64(block_restored(*left), values, case)
    expected = gated_gradient(da, z.double(), row_weight.double(), case.offsets, alpha, limit)
    for mine, true in zip(have, expected, strict=True):
        close(mine, true, 2 * BOUND[True])
        assert not mine[real:].any()


@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize(("k", "n"), [(256, 512), (288, 160)])
def test_mx_linear_is_the_product_of_one_matrix(k: int, n: int, swizzled: bool) -> None:
    case = ragged((1000,), 0, "cuda")
    (x, x_scale), (weight, weight_scale) = (mx_quantised(each) for each in made(case, k, n))
    bias, want = (
        torch.randn(n, device="cuda").bfloat16(),
        mx_restored(x, x_scale) @ mx_restored(weight, weight_scale)[0].t(),
    )
    if swizzled:
        x_scale, weight_scale = swizzle_scales(x_scale), swizzle_scales(weight_scale)
    have = mx_linear.mx_linear(x, x_scale, weight[0], weight_scale[0], bias, swizzled)
    close(have, want + bias.double(), BOUND[True])


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("n", "k"), [(256, 512), (160, 288), (2048, 1024)])
def test_mx_weight_gradients(sizes: tuple[int, ...], n: int, k: int) -> None:
    case = ragged(sizes, 37, "cuda")
    real, operands, values = case.rows - case.tail, list[Tensor](), list[Tensor]()
    for width in (n, k):
        x = torch.randn(case.rows, width, device="cuda") * torch.exp(torch.randn(case.rows, 1, device="cuda"))
        data, scale, ends = ops.mx_quantize_ragged_columns(poisoned(x, real), case.offsets)
        values.append(ops.mx_dequantize(data, scale, torch.float32, -2).double())
        operands += [data, swizzle_column_scales(scale, case.offsets)]
    have, start = mx_wgrad.mx_grouped_mm_wgrad(*operands, ends, True), 0
    for mine, end in zip(have, ends.tolist(), strict=True):
        if end > start:
            close(mine, values[0][start:end].t() @ values[1][start:end], BOUND[True])
        else:
            assert not mine.any()
        start = end
