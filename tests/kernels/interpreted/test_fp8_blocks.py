"""FP8 products with scales in blocks, in the interpreter, against float64 products of the same quantised values.

The interpreter's cast to FP8 loses the carry into the exponent: what rounds up to a power of two comes out as half of
it. So of what a kernel quantises, a few per cent of the elements are wrong here, and none on a GPU
(tests/kernels/test_scaled_cuda.py).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moegraph import ops
from moegraph.kernels import fp8_block_gemm, fp8_quantize_blocks, fp8_up_swiglu, gated_forward
from moegraph.kernels.activation import Activation
from moegraph.kernels.config import Config
from moegraph.ops.expert_ffn import activation_slopes
from tests.kernels.cases import Ragged, ragged, relative_error
from tests.kernels.scaled_cases import (
    block_quantised,
    block_restored,
    grouped64,
    poisoned,
    quantised,
    restored,
    square_quantised,
)

SMALL = Config(16, 64, 128, num_warps=4, num_stages=2)
SIZES = [((0, 1, 15, 16, 17), 9), ((33, 0, 0), 0), ((0, 0), 9)]
CASES = [pytest.param(ragged(*each), id=f"{each[0]}+{each[1]}") for each in SIZES]
BOUND = 6e-3


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("k", "n", "weighted"), [(128, 144, False), (384, 256, True)])
def test_each_block_of_the_contraction_has_its_scales(case: Ragged, k: int, n: int, weighted: bool) -> None:
    torch.manual_seed(0)
    real = case.rows - case.tail
    rows, row_scale = block_quantised(torch.randn(case.rows, k) * torch.exp(torch.randn(case.rows, k)))
    weight, weight_scale, values = square_quantised(torch.randn(len(case.sizes), n, k) * torch.exp(torch.randn(n, k)))
    want, row_weight, bias = grouped64(block_restored(rows, row_scale), values, case), None, None
    if weighted:
        row_weight, bias = torch.rand(case.rows), torch.randn(len(case.sizes), n).bfloat16()
        want[:real] += bias[case.expert_of_row].double()
        want *= row_weight.double()[:, None]
    scale = row_scale.clone()
    scale[:, real:] = float("nan")
    tensors = (poisoned(rows, real), scale, weight, weight_scale, case.offsets)
    have = fp8_block_gemm.fp8_block_grouped_mm(*tensors, bias=bias, row_weight=row_weight, config=SMALL)
    assert relative_error(have, want) < BOUND
    assert not have[real:].any()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("biased", [False, True])
def test_the_activation_leaves_quantised(case: Ragged, biased: bool) -> None:
    torch.manual_seed(0)
    d, f, real, experts = 48, 256, case.rows - case.tail, len(case.sizes)
    rows, weight = quantised(torch.randn(case.rows, d)), quantised(torch.randn(experts, 2 * f, d))
    bias = torch.randn(experts, 2 * f).bfloat16() if biased else None
    tensors = (poisoned(rows[0], real), poisoned(rows[1], real), *weight, case.offsets)
    config = Config(16, 256, 32, num_warps=4, num_stages=2)
    z, act, scale = fp8_up_swiglu.fp8_up_swiglu_blocks(*tensors, bias=bias, activation=Activation(), config=config)
    want = grouped64(restored(*rows), restored(*weight), case)
    if bias is not None:
        want[:real] += bias[case.expert_of_row].double()
    assert relative_error(z, want) < BOUND
    exact = activation_slopes(z.double(), 0.0, 0.0)[0]
    have = block_restored(act, scale)
    assert scale.shape == (2, case.rows)
    blocks, mine = exact.unflatten(1, (-1, 128)), have.unflatten(1, (-1, 128))
    largest = blocks.abs().amax(-1)
    off = (blocks - mine).abs() - blocks.abs() / 15
    assert (off <= largest[..., None] / 448 / 512 + 1e-12).double().mean() > 0.9
    assert torch.allclose(scale.t().double() * 448, torch.where(largest == 0, 448, largest), rtol=1e-5)
    assert (scale[:, real:] == 1).all()
    assert not have[real:].any()


def test_tiles_that_hold_no_whole_blocks_are_refused() -> None:
    data, scale = torch.zeros(1, 128).to(torch.float8_e4m3fn), torch.ones(1)
    weight, offsets = torch.zeros(1, 256, 128).to(torch.float8_e4m3fn), torch.tensor([1], dtype=torch.int32)
    tensors = (data, scale, weight, torch.ones(1, 256), offsets)
    with pytest.raises(ValueError, match="does not hold the 128 columns that share a scale"):
        fp8_up_swiglu.fp8_up_swiglu_blocks(*tensors, config=SMALL)
    tensors = (data, scale[:, None], weight, torch.ones(1, 2, 1), offsets)
    with pytest.raises(ValueError, match="more than one scale of a weight per step"):
        fp8_block_gemm.fp8_block_grouped_mm(*tensors, config=replace(SMALL, block_n=256))


@pytest.mark.parametrize("case", CASES)
def test_rows_and_weights_are_quantised_to_the_bits_of_the_reference(case: Ragged) -> None:
    torch.manual_seed(0)
    x = poisoned(
        (torch.randn(case.rows, 256) * torch.exp(torch.randn(case.rows, 256))).bfloat16(), case.rows - case.tail
    )
    weight = torch.randn(2, 144, 256).bfloat16()
    x[:1, :128], weight[1, :128, 128:], weight[0, 130, 3] = 0, 0, float("inf")
    for given in ((x, case.offsets), (weight, None)):
        have, want = fp8_quantize_blocks.fp8_quantize_blocks(*given), ops.fp8_quantize_blocks(*given)
        assert torch.equal(have[0].view(torch.uint8), want[0].view(torch.uint8))
        assert torch.equal(have[1].isnan(), want[1].isnan())
        assert torch.equal(have[1].nan_to_num(), want[1].nan_to_num())


@pytest.mark.parametrize("activation", [Activation(), Activation(True, 1.7, 0.8)])
def test_the_activation_as_a_pass_of_its_own(activation: Activation) -> None:
    case = ragged((0, 1, 15, 17), 9)
    real, z = case.rows - case.tail, poisoned(torch.randn(case.rows, 2 * 48).bfloat16(), case.rows - case.tail)
    act = z.new_full((case.rows, 48), float("nan"))
    gated_forward.gated_forward_launch(z, case.offsets, act, activation=activation).run()
    limit = activation.limit if activation.clamped else 0.0
    assert relative_error(act[:real], activation_slopes(z[:real].double(), activation.alpha, limit)[0]) < BOUND
    assert not act[real:].any()
