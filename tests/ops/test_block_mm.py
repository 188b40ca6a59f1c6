"""FP8 products with scales in blocks of 128, as operators: on CPU against float64; what is refused."""

from __future__ import annotations

import pytest
import torch

from moegraph.kernels.chips import Card
from moegraph.ops import block_mm, scaled_mm
from moegraph.ops.expert_ffn import activation_slopes
from tests.kernels.cases import Ragged, ragged, relative_error
from tests.kernels.scaled_cases import (
    block_quantised,
    block_restored,
    grouped64,
    poisoned,
    quantised,
    square_quantised,
)

SIZES = [(0, 1, 127, 128, 129), (0, 300, 0), (0, 0)]
CASES = [pytest.param(ragged(s, 37), id=str(s)) for s in SIZES]
K, N = 256, 144


@pytest.mark.parametrize("case", CASES)
def test_each_block_of_the_contraction_has_its_scales(case: Ragged) -> None:
    torch.manual_seed(0)
    real = case.rows - case.tail
    rows, row_scale = block_quantised(torch.randn(case.rows, K) * torch.exp(torch.randn(case.rows, K)))
    weight, weight_scale, values = square_quantised(torch.randn(len(case.sizes), N, K) * torch.exp(torch.randn(N, K)))
    row_weight = torch.rand(case.rows)
    want = grouped64(block_restored(rows, row_scale), values, case)
    row_scale[:, real:] = float("nan")
    tensors = (poisoned(rows, real), row_scale, weight, weight_scale, case.offsets)
    bias = torch.randn(len(case.sizes), N).bfloat16()
    have = block_mm.fp8_block_grouped_mm(*tensors, bias, poisoned(row_weight, real))
    want[:real] += bias[case.expert_of_row].double()
    assert relative_error(have, want * row_weight.double()[:, None]) < 3e-3
    assert not have[real:].any()
    torch.library.opcheck(torch.ops.moegraph.fp8_block_grouped_mm.default, tensors, test_utils="test_faketensor")


@pytest.mark.parametrize("case", CASES)
def test_the_activation_leaves_quantised(case: Ragged) -> None:
    torch.manual_seed(0)
    real = case.rows - case.tail
    rows, weight = quantised(torch.randn(case.rows, 64)), quantised(torch.randn(len(case.sizes), 512, 64))
    tensors = (poisoned(rows[0], real), poisoned(rows[1], real), *weight, case.offsets)
    z, act, scale = block_mm.fp8_up_swiglu_blocks(*tensors)
    assert torch.equal(z, scaled_mm.fp8_up_swiglu(*tensors)[0])
    blocks = activation_slopes(z.double(), 0.0, 0.0)[0].unflatten(1, (-1, 128))
    mine, largest = block_restored(act, scale).unflatten(1, (-1, 128)), blocks.abs().amax(-1, keepdim=True)
    # Half of the last of four bits, or half of the smallest FP8 value; 448 is the largest.
    assert ((blocks - mine).abs() <= blocks.abs() / 15.9 + largest / 448 / 1023 + 1e-12).all()
    assert torch.allclose(mine.abs().amax(-1, keepdim=True), largest, rtol=1e-6)
    assert (scale[:, real:] == 1).all()
    torch.library.opcheck(torch.ops.moegraph.fp8_up_swiglu_blocks.default, tensors, test_utils="test_faketensor")


def test_other_shapes_are_refused() -> None:
    rows, row_scale = block_quantised(torch.randn(8, K))
    weight, weight_scale, _ = square_quantised(torch.randn(2, N, K))
    offsets = torch.tensor([3, 8], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"rows must be \[2, 8\] of torch\.float32, got \[8, 2\]"):
        block_mm.fp8_block_grouped_mm(rows, row_scale.t(), weight, weight_scale, offsets)
    with pytest.raises(ValueError, match="a contraction over 96 is not whole blocks of 128"):
        block_mm.fp8_block_grouped_mm(rows[:, :96], row_scale, weight[:, :, :96], weight_scale, offsets)
    with pytest.raises(ValueError, match="72 columns are not whole blocks of 128"):
        block_mm.fp8_up_swiglu_blocks(rows, row_scale[0], weight, weight_scale[:, :, 0], offsets)


@pytest.mark.parametrize(("capability", "backend"), [(90, "triton"), (89, "emulated"), (100, "emulated")])
def test_where_the_kernels_run(capability: int, backend: str) -> None:
    assert block_mm.block_backend(256, 128, Card("any", capability))[0] == backend
