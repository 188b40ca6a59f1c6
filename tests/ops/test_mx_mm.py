"""MXFP8 products as operators: on CPU against float64, with scales in both layouts; the layouts; what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moegraph import ops
from moegraph.kernels.chips import Card
from moegraph.ops import mx_mm, mx_quantized_mm
from moegraph.ops.expert_ffn import activation_slopes, gated_gradient
from moegraph.ops.mx_scales import swizzle_row_scales, swizzle_scales
from moegraph.ops.scaled_reference import mx_dequantise
from tests.kernels.cases import Ragged, ragged, relative_error
from tests.kernels.scaled_cases import grouped64, mx_quantised, mx_restored, poisoned

mg = torch.ops.moegraph
SIZES = [(0, 1, 127, 128, 129), (0, 300, 0), (0, 0)]
CASES = [pytest.param(ragged(s, 37), id=str(s)) for s in SIZES]
K, N = 160, 144
BOUND = 3e-3  # bf16's rounding of the result


def operands(case: Ragged, layout: str, n: int = N) -> tuple[tuple[Tensor, ...], Tensor]:
    """(rows, row_scale, weight, weight_scale, offsets with NaN in what does not exist; the product in float64)."""
    torch.manual_seed(0)
    real = case.rows - case.tail
    rows, row_scale = mx_quantised(torch.randn(case.rows, K) * torch.exp(torch.randn(case.rows, K)))
    weight, weight_scale = mx_quantised(torch.randn(len(case.sizes), n, K) * torch.exp(torch.randn(n, K)))
    want = grouped64(mx_restored(rows, row_scale), mx_restored(weight, weight_scale), case)
    row_scale = poisoned(row_scale, real)
    if layout == "swizzled":
        row_scale, weight_scale = swizzle_row_scales(row_scale, case.offsets), swizzle_scales(weight_scale)
    return (poisoned(rows, real), row_scale, weight, weight_scale, case.offsets), want


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", ["plain", "swizzled"])
def test_the_product_with_bias_and_row_weight(case: Ragged, layout: str) -> None:
    (p, want), real = operands(case, layout), case.rows - case.tail
    bias, row_weight = torch.randn(len(case.sizes), N).bfloat16(), torch.rand(case.rows)
    swizzled = layout == "swizzled"
    assert relative_error(mx_mm.mx_grouped_mm(*p, swizzled=swizzled), want) < BOUND
    want[:real] += bias[case.expert_of_row].double()
    have = mx_mm.mx_grouped_mm(*p, bias, poisoned(row_weight, real), swizzled)
    assert relative_error(have, want * row_weight.double()[:, None]) < BOUND
    assert not have[real:].any()


def test_a32_products_over_any_count_per_expert_are_those_of_dequantised_operands() -> None:
    """Forward product and input gradient as the graph calls them, no count being a multiple of a block or a tile."""
    case = ragged((1, 31, 32, 33, 0, 44, 64, 3), 7)
    real, generator = case.rows - case.tail, torch.Generator().manual_seed(0)
    weight = torch.randn(8, 128, K, generator=generator).bfloat16()
    for matrix in (weight, weight.transpose(1, 2).contiguous()):
        rows = torch.randn(case.rows, matrix.shape[2], generator=generator).bfloat16()
        plain, by = ops.mx_quantize_rows(rows, case.offsets), ops.mx_quantize_rows(matrix)
        want = grouped64(mx_restored(*plain), mx_restored(*by), case)
        quantised = ops.mx_quantize_rows(poisoned(rows, real), case.offsets, swizzled=True)
        have = mx_mm.mx_grouped_mm(
            *quantised, *ops.mx_quantize_rows(matrix, swizzled=True), case.offsets, swizzled=True
        )
        start = 0
        for size in case.sizes:
            assert relative_error(have[start : start + size], want[start : start + size]) < BOUND
            start += size
        assert not have[real:].any()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("alpha", "limit", "layout"), [(0.0, 0.0, "plain"), (1.7, 0.8, "swizzled")])
def test_the_experts_halves(case: Ragged, alpha: float, limit: float, layout: str) -> None:
    (p, want), real = operands(case, layout, 2 * N), case.rows - case.tail
    z, act = mx_mm.mx_up_swiglu(*p, None, alpha, limit, layout == "swizzled")
    assert relative_error(z, want) < BOUND
    assert relative_error(act, activation_slopes(z.double(), alpha, limit)[0]) < BOUND
    (p, want), row_weight = operands(case, layout), torch.rand(case.rows)
    rest = (poisoned(z, real), poisoned(row_weight, real), case.offsets, alpha, limit, layout == "swizzled")
    have = mx_mm.mx_dgrad_swiglu(*p[:4], *rest)
    expected = gated_gradient(want, z.double(), row_weight.double(), case.offsets, alpha, limit)
    for mine, true in zip(have, expected, strict=True):
        assert relative_error(mine, true) < BOUND
        assert not mine[real:].any()


def bits(tensors: tuple[Tensor, ...]) -> list[Tensor]:
    return [t.contiguous().view(torch.uint8) for t in tensors]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("alpha", "limit"), [(0.0, 0.0), (1.7, 0.8)])
def test_results_in_mxfp8_are_those_of_quantising_the_others(case: Ragged, alpha: float, limit: float) -> None:
    f, real = 160, case.rows - case.tail
    p, _ = operands(case, "swizzled", 2 * f)
    bias = torch.randn(len(case.sizes), 2 * f).bfloat16()
    z, act = mx_mm.mx_up_swiglu(*p, bias, alpha, limit, True)
    have = mx_quantized_mm.mx_up_swiglu_quantized(*p, bias, alpha, limit)
    want = (z, *ops.mx_quantize_rows(act, case.offsets, swizzled=True))
    assert all(map(torch.equal, bits(have), bits(want)))
    p, _ = operands(case, "swizzled", f)
    tensors = (*p[:4], poisoned(z, real), poisoned(torch.rand(case.rows), real), case.offsets, alpha, limit)
    plain = mx_mm.mx_dgrad_swiglu(*tensors, True)
    want = (*plain, *ops.mx_quantize_rows(plain[0], case.offsets, swizzled=True))
    assert all(map(torch.equal, bits(mx_quantized_mm.mx_dgrad_swiglu_quantized(*tensors)), bits(want)))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("alpha", "limit"), [(0.0, 0.0), (1.7, 0.8)])
def test_a_saved_pre_activation_is_quantised_and_restored(case: Ragged, alpha: float, limit: float) -> None:
    f, real = 160, case.rows - case.tail
    p, _ = operands(case, "swizzled", 2 * f)
    z, *act = mx_quantized_mm.mx_up_swiglu_quantized(*p, None, alpha, limit)
    saved = ops.mx_quantize_rows(z, case.offsets)
    assert all(map(torch.equal, bits(mx_quantized_mm.mx_up_swiglu_saved(*p, None, alpha, limit)), bits((*saved, *act))))
    p, _ = operands(case, "swizzled", f)
    rest = (poisoned(torch.rand(case.rows), real), case.offsets, alpha, limit)
    want = mx_quantized_mm.mx_dgrad_swiglu_quantized(*p[:4], ops.mx_dequantize_rows(*saved), *rest)
    assert all(map(torch.equal, bits(mx_quantized_mm.mx_dgrad_swiglu_saved(*p[:4], *saved, *rest)), bits(want)))


def test_results_that_are_not_whole_blocks_are_refused() -> None:
    case = ragged((3, 5))
    p, _ = operands(case, "swizzled", 2 * 48)
    with pytest.raises(ValueError, match="48 columns of the activation are not whole blocks of 32"):
        mx_quantized_mm.mx_up_swiglu_quantized(*p)
    p, _ = operands(case, "swizzled", 40)
    rest = (torch.randn(8, 80).bfloat16(), torch.rand(8), case.offsets)
    with pytest.raises(ValueError, match="80 columns of dz are not whole blocks of 32"):
        mx_quantized_mm.mx_dgrad_swiglu_quantized(*p[:4], *rest)


def test_the_ends_of_the_scale_are_their_values() -> None:
    data = torch.full((1, 96), 1.0).to(torch.float8_e4m3fn)
    have = mx_dequantise(data, torch.tensor([[0, 254, 255]], dtype=torch.uint8), torch.float32)
    assert torch.equal(have[0, :64], torch.tensor([2.0**-127, 2.0**127]).repeat_interleave(32))
    assert have[0, 64:].isnan().all()


@pytest.mark.parametrize("layout", ["plain", "swizzled"])
@pytest.mark.parametrize("name", ["mx_grouped_mm", "mx_up_swiglu", "mx_dgrad_swiglu"])
def test_the_operators_are_registered_as_they_behave(name: str, layout: str) -> None:
    case = ragged((3, 0, 5), 2)
    p, _ = operands(case, layout)
    arguments: tuple[Any, ...] = p
    if name == "mx_dgrad_swiglu":
        arguments = (*p[:4], torch.randn(case.rows, 2 * N).bfloat16(), torch.rand(case.rows), case.offsets)
    before = [t.clone() for t in arguments]
    options = {"swizzled": layout == "swizzled"}
    torch.library.opcheck(getattr(mg, name).default, arguments, options, test_utils="test_faketensor")
    for a, b in zip(arguments, before, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_other_shapes_and_dtypes_are_refused() -> None:
    (rows, row_scale, weight, weight_scale, offsets), _ = operands(ragged((3, 5)), "plain")
    with pytest.raises(ValueError, match="a contraction over 144 is not whole blocks of 32"):
        mx_mm.mx_grouped_mm(rows[:, :144], row_scale, weight[:, :, :144], weight_scale, offsets)
    with pytest.raises(ValueError, match=r"rows must be \[8, 5\] of torch\.uint8, got \[8, 4\]"):
        mx_mm.mx_grouped_mm(rows, row_scale[:, :4], weight, weight_scale, offsets)
    with pytest.raises(ValueError, match=r"rows must be \[384, 8\] of torch\.uint8, got \[8, 5\]"):
        mx_mm.mx_grouped_mm(rows, row_scale, weight, weight_scale, offsets, swizzled=True)
    with pytest.raises(ValueError, match=r"weight must be \[2, 256, 8\] of torch\.uint8, got \[2, 144, 5\]"):
        mx_mm.mx_up_swiglu(rows, swizzle_row_scales(row_scale, offsets), weight, weight_scale, offsets, swizzled=True)
    with pytest.raises(ValueError, match=r"rows must be torch\.float8_e4m3fn, got torch\.float32"):
        mx_mm.mx_grouped_mm(rows.float(), row_scale, weight, weight_scale, offsets)


@pytest.mark.parametrize(
    ("capability", "n", "backend"), [(90, 128, "emulated"), (100, 128, "triton"), (103, 144, "emulated")]
)
def test_where_the_kernels_run(capability: int, n: int, backend: str) -> None:
    assert mx_mm.mx_backend(n, 160, Card("any", capability))[0] == backend
