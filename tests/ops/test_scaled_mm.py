"""FP8 products as operators: on CPU against float64 at every awkward group size; shapes, dtypes and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moegraph.kernels.chips import Card
from moegraph.ops import mx_mm, scaled_mm
from moegraph.ops.expert_ffn import activation_slopes, gated_gradient
from tests.kernels.cases import Ragged, ragged, relative_error
from tests.kernels.scaled_cases import grouped64, poisoned, quantised, restored, transposed_runs
from tests.ops.scaled_calls import scaled_calls

SIZES = [(0, 1, 127, 128, 129), (0, 300, 0), (0, 0)]
CASES = [pytest.param(ragged(s, 37), id=str(s)) for s in SIZES]
K, N = 96, 64
BOUND = 3e-3  # bf16's rounding of the result


def operands(case: Ragged, n: int = N) -> tuple[Tensor, ...]:
    """rows, row_scale, weight, weight_scale, offsets; what does not exist holds NaN."""
    torch.manual_seed(0)
    real = case.rows - case.tail
    rows, row_scale = quantised(torch.randn(case.rows, K) * torch.exp(torch.randn(case.rows, 1)))
    weight, weight_scale = quantised(torch.randn(len(case.sizes), n, K) * torch.exp(torch.randn(n, 1)))
    return poisoned(rows, real), poisoned(row_scale, real), weight, weight_scale, case.offsets


def product64(case: Ragged, p: tuple[Tensor, ...]) -> Tensor:
    return grouped64(restored(p[0], p[1]), restored(p[2], p[3]), case)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("exact", [False, True])
def test_the_product_with_bias_and_row_weight(case: Ragged, exact: bool) -> None:
    p, real = operands(case), case.rows - case.tail
    bias, row_weight = torch.randn(len(case.sizes), N).bfloat16(), torch.rand(case.rows)
    want = product64(case, p)
    assert relative_error(scaled_mm.fp8_grouped_mm(*p, exact=exact), want) < BOUND
    want[:real] += bias[case.expert_of_row].double()
    have = scaled_mm.fp8_grouped_mm(*p, bias, poisoned(row_weight, real), exact)
    assert relative_error(have, want * row_weight.double()[:, None]) < BOUND
    assert not have[real:].any()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("alpha", "limit"), [(0.0, 0.0), (1.7, 0.8)])
def test_the_experts_halves(case: Ragged, alpha: float, limit: float) -> None:
    p, real = operands(case, 2 * N), case.rows - case.tail
    z, act = scaled_mm.fp8_up_swiglu(*p, None, alpha, limit)
    assert relative_error(z, product64(case, p)) < BOUND
    assert relative_error(act, activation_slopes(z.double(), alpha, limit)[0]) < BOUND
    p, row_weight = operands(case), torch.rand(case.rows)
    tensors = (*p[:4], poisoned(z, real), poisoned(row_weight, real), case.offsets)
    have = scaled_mm.fp8_dgrad_swiglu(*tensors, alpha, limit)
    want = gated_gradient(product64(case, p), z.double(), row_weight.double(), case.offsets, alpha, limit)
    for mine, true in zip(have, want, strict=True):
        assert relative_error(mine, true) < BOUND
        assert not mine[real:].any()


@pytest.mark.parametrize("case", CASES)
def test_the_weight_gradient(case: Ragged) -> None:
    torch.manual_seed(0)
    real = case.rows - case.tail
    grad, rows = torch.randn(real, N), torch.randn(real, K)
    grad_t, grad_scale, ends = transposed_runs(grad, case, scaled_mm.WGRAD_ALIGN)
    rows_t, rows_scale, _ = transposed_runs(rows, case, scaled_mm.WGRAD_ALIGN)
    have, start = scaled_mm.fp8_grouped_mm_wgrad(grad_t, grad_scale, rows_t, rows_scale, ends), 0
    assert not have[[e for e, size in enumerate(case.sizes) if size == 0]].any()
    for e, size in enumerate(case.sizes):
        left, right = (quantised(x[start : start + size].t()) for x in (grad, rows) if size) if size else (None, None)
        if left is not None and right is not None:
            assert relative_error(have[e], restored(*left) @ restored(*right).t()) < BOUND
        start += size


def test_operands_are_left_as_they_are() -> None:
    for operator, arguments, _ in scaled_calls().values():
        tensors = [each for each in arguments if isinstance(each, torch.Tensor)]
        before = [t.clone() for t in tensors]
        operator(*arguments)
        for a, b in zip(tensors, before, strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_no_rows_at_all_give_empty_results_and_zero_weight_gradients() -> None:
    p = operands(ragged((0, 0)), 2 * N)
    assert scaled_mm.fp8_grouped_mm(*p).shape == (0, 2 * N)
    assert [t.shape for t in scaled_mm.fp8_up_swiglu(*p)] == [(0, 2 * N), (0, N)]
    grad_t, scale = torch.zeros(N, 0).to(scaled_mm.FP8), torch.ones(2, N)
    assert not scaled_mm.fp8_grouped_mm_wgrad(grad_t, scale, grad_t, scale, p[4]).any()
    scales = torch.zeros(0, K // 32, dtype=torch.uint8), torch.zeros(2, 2 * N, K // 32, dtype=torch.uint8)
    assert mx_mm.mx_grouped_mm(p[0], scales[0], p[2], scales[1], p[4]).shape == (0, 2 * N)


def test_other_shapes_and_dtypes_are_refused() -> None:
    rows, row_scale, weight, weight_scale, offsets = operands(ragged((3, 5)))
    with pytest.raises(ValueError, match=r"\[8, 64\] and \[2, 64, 96\] are not \[R, K\] and \[E, N, K\]"):
        scaled_mm.fp8_grouped_mm(rows[:, :64], row_scale, weight, weight_scale, offsets)
    with pytest.raises(ValueError, match=r"rows must be torch\.float8_e4m3fn, got torch\.bfloat16"):
        scaled_mm.fp8_grouped_mm(rows.bfloat16(), row_scale, weight, weight_scale, offsets)
    with pytest.raises(ValueError, match=r"the scale of .*weight must be \[2, 64\] of torch\.float32, got \[64\]"):
        scaled_mm.fp8_up_swiglu(rows, row_scale, weight, weight_scale[0], offsets)
    with pytest.raises(ValueError, match=r"are not \[N, P\] and \[K, P\], P % 16 = 0"):
        scaled_mm.fp8_grouped_mm_wgrad(rows.t(), row_scale, rows.t(), row_scale, offsets)


@pytest.mark.parametrize(
    ("card", "n", "backend"),
    [
        (Card("any", 90), 64, "triton"),
        (Card("any", 103), 64, "triton"),
        (Card("any", 90), 40, "emulated"),
        (Card("any", 89), 64, "emulated"),
        (torch.device("cpu"), 64, "emulated"),
    ],
)
def test_where_the_kernels_run(card: Any, n: int, backend: str) -> None:
    assert scaled_mm.fp8_backend(n, 64, card)[0] == backend
