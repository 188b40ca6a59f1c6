"""The gradient of the experts' biases against float64, with one part per expert and with several."""

from __future__ import annotations

import pytest
import torch

from moegraph.kernels import bias_grad
from tests.kernels.cases import Ragged, ragged, relative_error

SIZES = [(0, 1, 31, 32, 33), (33, 0, 0, 0), (5,), (0, 0), (7, 600, 2), (1200, 0)]
CASES = [pytest.param(ragged(s, tail), id=f"{s}+{tail}") for s in SIZES for tail in (0, 9) if sum(s) + tail]
DTYPES = {torch.float64: 1e-15, torch.float32: 1e-6, torch.bfloat16: 8e-3}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("width", [16, 40, 130])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sum_over_each_experts_rows(case: Ragged, width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    grad = torch.randn(case.rows, width).to(dtype)
    real = case.rows - case.tail
    want = torch.zeros(len(case.sizes), width, dtype=torch.float64)
    want.index_add_(0, case.expert_of_row, grad[:real].double())
    grad[real:] = float("nan")
    have = bias_grad.bias_grad(grad, case.offsets)
    assert have.dtype == dtype
    assert relative_error(have, want) <= DTYPES[dtype]
    assert all((have[e] == 0).all() for e, size in enumerate(case.sizes) if size == 0)


def test_how_many_parts_depends_on_sizes_only() -> None:
    assert [bias_grad.num_parts(rows, 8) for rows in (0, 100, 4096, 262144, 2**22)] == [1, 1, 2, 64, 64]
    assert bias_grad.num_parts(262144, 128) == 8


def test_no_rows_give_zeros() -> None:
    assert (bias_grad.bias_grad(torch.empty(0, 16), torch.zeros(3, dtype=torch.int32)) == 0).all()
