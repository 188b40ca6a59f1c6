"""Weight gradients in MXFP8 as an operator: on CPU against float64; no row that pads a run is felt; what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moegraph import ops
from moegraph.ops.mx_scales import swizzle_column_scales, unswizzle_column_scales
from moegraph.ops.mx_wgrad import mx_grouped_mm_wgrad
from tests.kernels.cases import Ragged, ragged, relative_error
from tests.kernels.scaled_cases import poisoned

SIZES = [(1, 31, 32, 33, 0, 44, 64, 3), (0, 1, 127, 128, 129), (0, 300, 0), (0, 0)]
CASES = [pytest.param(ragged(s, 37), id=str(s)) for s in SIZES]
N, K = 144, 160


def runs(case: Ragged, width: int, swizzled: bool, seed: int) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """(data, scale, padded ends; each expert's quantised rows in float64, without padding). Rows that do not exist are
    NaN before they are quantised, and so is what lies behind the last run afterwards."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(case.rows, width, generator=generator) * torch.exp(torch.randn(case.rows, 1, generator=generator))
    data, scale, ends = ops.mx_quantize_ragged_columns(poisoned(x, case.rows - case.tail), case.offsets)
    found, start = [], 0
    for size, end in zip(case.sizes, ends.tolist(), strict=True):
        run = ops.mx_dequantize(data[start:end], scale[start // 32 : end // 32], torch.float32, -2)
        assert not run[size:].any()
        found.append(run[:size].double())
        start = end
    data.view(torch.uint8)[start:] = 0x7F
    scale[start // 32 :] = 255
    return (data, swizzle_column_scales(scale, case.offsets) if swizzled else scale, ends), found


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("swizzled", [False, True])
def test_a32_each_expert_contracts_over_its_own_rows_whatever_their_number(case: Ragged, swizzled: bool) -> None:
    grad, left = runs(case, N, swizzled, 0)
    rows, right = runs(case, K, swizzled, 1)
    have = mx_grouped_mm_wgrad(*grad[:2], *rows[:2], grad[2], swizzled)
    for mine, g, x in zip(have, left, right, strict=True):
        assert relative_error(mine, g.t() @ x) < 3e-3
        assert bool(mine.any()) == bool(g.shape[0])
    call = torch.ops.moegraph.mx_grouped_mm_wgrad.default
    torch.library.opcheck(call, (*grad[:2], *rows[:2], grad[2], swizzled), test_utils="test_faketensor")


@pytest.mark.parametrize("case", CASES)
def test_swizzled_scales_come_back_as_they_were(case: Ragged) -> None:
    _, scale, ends = ops.mx_quantize_ragged_columns(torch.randn(case.rows, K), case.offsets)
    swizzled = swizzle_column_scales(scale, case.offsets)
    assert torch.equal(unswizzle_column_scales(swizzled, K, case.offsets), scale)
    assert torch.equal(unswizzle_column_scales(swizzled, K, ends), scale)


def test_other_shapes_and_dtypes_are_refused() -> None:
    case = ragged((3, 5))
    (grad, grad_scale, ends), _ = runs(case, N, False, 0)
    (rows, rows_scale, _), _ = runs(case, K, False, 1)
    with pytest.raises(ValueError, match=r"are not \[P, N\] and \[P, K\], P % 128 = 0"):
        mx_grouped_mm_wgrad(grad[:96], grad_scale, rows[:96], rows_scale, ends)
    with pytest.raises(ValueError, match=r"rows must be \[12, 160\] of torch\.uint8, got \[4, 160\]"):
        mx_grouped_mm_wgrad(grad, grad_scale, rows, rows_scale[:4], ends)
    with pytest.raises(ValueError, match=r"grad must be \[256, 12\] of torch\.uint8, got \[12, 144\]"):
        mx_grouped_mm_wgrad(grad, grad_scale, rows, rows_scale, ends, swizzled=True)
    with pytest.raises(ValueError, match=r"grad must be torch\.float8_e4m3fn, got torch\.float32"):
        mx_grouped_mm_wgrad(grad.float(), grad_scale, rows, rows_scale, ends)
