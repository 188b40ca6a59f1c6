"""How much noise the 8-bit recipes put into one product: against float64 products of the same bf16 inputs, in dB.

Inputs are normal. An element of E4M3 is within 1/16 of what it stands for, so that two quantised operands leave a
product near 28.5 dB; a wrong scale, block or row anywhere is far below. Every expert is held to the gate by itself:
among all of them one wrong tile would not be seen.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from moegraph import ops
from moegraph.ops.block_mm import fp8_block_grouped_mm
from moegraph.ops.mx_linear import mx_linear
from moegraph.ops.mx_mm import mx_grouped_mm
from moegraph.ops.mx_scales import pad_rows, padded_offsets
from moegraph.ops.mx_wgrad import mx_grouped_mm_wgrad
from moegraph.ops.scaled_mm import fp8_grouped_mm, fp8_grouped_mm_wgrad
from moegraph.verify.compare import sqnr
from tests.kernels.cases import Ragged, ragged

OUTPUT, INPUT_GRADIENT, WEIGHT_GRADIENT = 27.0, 25.0, 25.0  # least SQNR in dB
MOST = 40.0  # bf16 itself has 48: nothing above this has been quantised
CASE = ragged((128, 0, 65, 255), 0)
D, F = 1024, 512
Product = Callable[[Tensor, Tensor, Tensor], Tensor]


def mx(rounding: str) -> Product:
    def product(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        left, right = (ops.mx_quantize(each, rounding=rounding) for each in (rows, weight))
        return mx_grouped_mm(*left, *right, offsets)

    return product


def fp8_rows(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    return fp8_grouped_mm(*ops.fp8_quantize_rows(rows, offsets), *ops.fp8_quantize_rows(weight), offsets)


def fp8_blocks(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    return fp8_block_grouped_mm(*ops.fp8_quantize_blocks(rows, offsets), *ops.fp8_quantize_blocks(weight), offsets)


def mx_wgrad(rounding: str) -> Product:
    def product(grad: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:
        left, right = (ops.mx_quantize(pad_rows(each, offsets), -2, rounding=rounding) for each in (grad, rows))
        return mx_grouped_mm_wgrad(*left, *right, padded_offsets(offsets))

    return product


def fp8_wgrad(grad: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:
    left, right = (ops.fp8_quantize_columns_t(each, offsets) for each in (grad, rows))
    return fp8_grouped_mm_wgrad(*left[:2], *right[:2], left[2])


ROWS: dict[str, Product] = {"rceil": mx("rceil"), "floor": mx("floor"), "rowwise": fp8_rows, "blockwise": fp8_blocks}
WGRADS: dict[str, Product] = {"rceil": mx_wgrad("rceil"), "floor": mx_wgrad("floor"), "rowwise": fp8_wgrad}


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def experts(case: Ragged) -> list[tuple[int, slice]]:
    """(expert, its rows) of those that have any."""
    ends = case.offsets.tolist()
    return [
        (e, slice(start, end)) for e, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)) if end > start
    ]


@pytest.mark.parametrize("recipe", ROWS)
def test_an_output_has_27_db_and_an_input_gradient_25(recipe: str) -> None:
    x, grad, weight = normal(CASE.rows, D, seed=0), normal(CASE.rows, F, seed=1), normal(4, F, D, seed=2)
    out = ROWS[recipe](x, weight, CASE.offsets)
    dx = ROWS[recipe](grad, weight.transpose(1, 2).contiguous(), CASE.offsets)
    for e, rows in experts(CASE):
        assert OUTPUT <= sqnr(x[rows].double() @ weight[e].double().t(), out[rows]) < MOST
        assert INPUT_GRADIENT <= sqnr(grad[rows].double() @ weight[e].double(), dx[rows]) < MOST


@pytest.mark.parametrize("recipe", WGRADS)
def test_a_weight_gradient_has_25_db(recipe: str) -> None:
    x, grad = normal(CASE.rows, D, seed=0), normal(CASE.rows, F, seed=1)
    dw = WGRADS[recipe](grad, x, CASE.offsets)
    for e, rows in experts(CASE):
        assert WEIGHT_GRADIENT <= sqnr(grad[rows].double().t() @ x[rows].double(), dw[e]) < MOST
    assert not dw[1].any()


@pytest.mark.parametrize("rounding", ["rceil", "floor"])
def test_a_linear_layer_has_as_much(rounding: str) -> None:
    x, weight = normal(256, D, seed=0), normal(F, D, seed=1)
    left, right = (ops.mx_quantize(each, rounding=rounding) for each in (x, weight))
    assert OUTPUT <= sqnr(x.double() @ weight.double().t(), mx_linear(*left, *right)) < MOST


def test_what_the_graph_calls_is_the_recipe_that_rounds_up() -> None:
    """Operators quantise with `rceil`, which is 0.9 dB better than `floor`: nothing saturates."""
    x, weight = normal(CASE.rows, D, seed=0), normal(4, F, D, seed=2)
    operands = (*ops.mx_quantize_rows(x, CASE.offsets, swizzled=True), *ops.mx_quantize_rows(weight, swizzled=True))
    have = mx_grouped_mm(*operands, CASE.offsets, swizzled=True)
    up, down = (ROWS[rounding](x, weight, CASE.offsets) for rounding in ("rceil", "floor"))
    assert torch.equal(have, up)
    want = torch.cat([x[rows].double() @ weight[e].double().t() for e, rows in experts(CASE)])
    assert 0.5 < sqnr(want, up) - sqnr(want, down) < 1.5
    left, right = (ops.mx_quantize_ragged_columns(each, CASE.offsets, swizzled=True) for each in (x, x))
    dw = mx_grouped_mm_wgrad(*left[:2], *right[:2], left[2], True)
    assert torch.equal(dw, WGRADS["rceil"](x, x, CASE.offsets))
