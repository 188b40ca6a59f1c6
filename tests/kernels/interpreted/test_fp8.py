"""FP8 products in the interpreter, which multiplies FP8 exactly and adds in fp32, against float64 products of the same
quantised values. Results are bf16, to which the interpreter truncates: up to 0.8 % of a value, 0.5 % of a norm.

The interpreter takes the NaN of FP8 for 480, and knows nothing of `exact`, which changes how Hopper accumulates: see
tests/kernels/test_scaled_cuda.py.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from moegraph.kernels import fp8_dgrad_swiglu, fp8_rows_gemm, fp8_up_swiglu, fp8_wgrad
from moegraph.kernels.activation import Activation
from moegraph.kernels.config import Config
from moegraph.ops.expert_ffn import activation_slopes, gated_gradient
from tests.kernels.cases import Ragged, ragged, relative_error
from tests.kernels.scaled_cases import grouped64, poisoned, quantised, restored, transposed_runs

SMALL = Config(16, 32, 32, num_warps=4, num_stages=2)
ACTIVATIONS = {"swiglu": Activation(), "clamped": Activation(True, 1.7, 0.8)}
SIZES = [((0, 1, 15, 16, 17), 9), ((33, 0, 0), 0), ((0, 0), 9)]
CASES = [pytest.param(ragged(*each), id=f"{each[0]}+{each[1]}") for each in SIZES]
WIDTHS = [(32, 32), (48, 80)]
BOUND = 6e-3


def operands(case: Ragged, k: int, n: int) -> dict[str, Tensor]:
    """Rows and weights whose scales differ by row, with NaN in what does not exist."""
    torch.manual_seed(0)
    real = case.rows - case.tail
    rows, row_scale = quantised(torch.randn(case.rows, k) * torch.exp(torch.randn(case.rows, 1)))
    weight, weight_scale = quantised(torch.randn(len(case.sizes), n, k) * torch.exp(torch.randn(n, 1)))
    made = {"rows": poisoned(rows, real), "row_scale": poisoned(row_scale, real)}
    return {**made, "weight": weight, "weight_scale": weight_scale, "offsets": case.offsets}


def want(case: Ragged, p: dict[str, Tensor]) -> Tensor:
    return grouped64(restored(p["rows"], p["row_scale"]), restored(p["weight"], p["weight_scale"]), case)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("k", "n"), WIDTHS)
@pytest.mark.parametrize(("parts", "extras"), [(1, ""), (2, "bias"), (1, "weight"), (2, "bias weight")])
def test_the_product_of_scaled_rows(case: Ragged, k: int, n: int, parts: int, extras: str) -> None:
    p = operands(case, k, n)
    options: dict[str, Any] = {"config": replace(SMALL, parts=parts)}
    expected, real = want(case, p), case.rows - case.tail
    if "bias" in extras:
        options["bias"] = torch.randn(len(case.sizes), n).bfloat16()
        expected[:real] += options["bias"][case.expert_of_row].double()
    if "weight" in extras:
        scale = torch.rand(case.rows)
        options["row_weight"] = poisoned(scale, real)
        expected *= scale.double()[:, None]
    have = fp8_rows_gemm.fp8_grouped_mm(*p.values(), **options)
    assert have.dtype == torch.bfloat16
    assert relative_error(have, expected) < BOUND
    assert not have[real:].any()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("d", "f"), WIDTHS)
@pytest.mark.parametrize(("name", "biased"), [("swiglu", False), ("clamped", True)])
def test_the_up_projection_and_its_activation(case: Ragged, d: int, f: int, name: str, biased: bool) -> None:
    p, activation, real = operands(case, d, 2 * f), ACTIVATIONS[name], case.rows - case.tail
    bias = torch.randn(len(case.sizes), 2 * f).bfloat16() if biased else None
    z, act = fp8_up_swiglu.fp8_up_swiglu(*p.values(), bias=bias, activation=activation, config=SMALL)
    expected = want(case, p)
    if bias is not None:
        expected[:real] += bias[case.expert_of_row].double()
    assert relative_error(z, expected) < BOUND
    limit = activation.limit if activation.clamped else 0.0
    assert relative_error(act, activation_slopes(z.double(), activation.alpha, limit)[0]) < BOUND
    assert not z[real:].any()
    assert not act[real:].any()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("d", "f"), WIDTHS)
@pytest.mark.parametrize(
    ("name", "kind"), [("swiglu", "1"), ("swiglu", "2"), ("swiglu", "4"), ("clamped", "2"), ("swiglu", "separate")]
)
def test_the_gradient_through_down_and_activation(case: Ragged, d: int, f: int, name: str, kind: str) -> None:
    p, activation, real = operands(case, d, f), ACTIVATIONS[name], case.rows - case.tail
    config = replace(SMALL, separate=True) if kind == "separate" else replace(SMALL, block_n=64, parts=int(kind))
    z, row_weight = torch.randn(case.rows, 2 * f).bfloat16(), torch.rand(case.rows)
    tensors = (*list(p.values())[:4], poisoned(z, real), poisoned(row_weight, real), case.offsets)
    have = fp8_dgrad_swiglu.fp8_dgrad_swiglu(*tensors, activation=activation, config=config)
    limit = activation.limit if activation.clamped else 0.0
    expected = gated_gradient(want(case, p), z.double(), row_weight.double(), case.offsets, activation.alpha, limit)
    for mine, true in zip(have, expected, strict=True):
        assert relative_error(mine, true) < 2 * BOUND  # `separate` rounds da to bf16 on the way
        assert not mine[real:].any()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("k", "n", "parts"), [(*WIDTHS[0], 1), (*WIDTHS[1], 2)])
def test_the_weight_gradient_of_transposed_runs(case: Ragged, k: int, n: int, parts: int) -> None:
    torch.manual_seed(0)
    real = case.rows - case.tail
    grad_t, grad_scale, ends = transposed_runs(torch.randn(real, n), case, 128)
    rows_t, rows_scale, _ = transposed_runs(torch.randn(real, k) * torch.exp(torch.randn(k)), case, 128)
    have = fp8_wgrad.fp8_wgrad(grad_t, grad_scale, rows_t, rows_scale, ends, config=replace(SMALL, parts=parts))
    bounds = [0, *ends.tolist()]
    for e, (start, end) in enumerate(pairwise(bounds)):
        if start == end:
            continue
        left = grad_t[:, start:end].float().double() * grad_scale[e].double()[:, None]
        right = rows_t[:, start:end].float().double() * rows_scale[e].double()[:, None]
        assert relative_error(have[e], left @ right.t()) < BOUND
    finite = [e for e, size in enumerate(case.sizes) if size == 0]
    assert not have[finite].any()


def test_a_step_may_not_cross_experts() -> None:
    data, scale = torch.zeros(16, 256).to(torch.float8_e4m3fn), torch.ones(1, 16)
    ends = torch.tensor([256], dtype=torch.int32)
    with pytest.raises(ValueError, match="block_k 256 would cross experts"):
        fp8_wgrad.fp8_wgrad(data, scale, data, scale, ends, config=replace(SMALL, block_k=256))
