"""MXFP8 products in the interpreter against float64 products of the same quantised values.

Triton 3.6's interpreter has no `dot_scaled`: the fixture gives it one in numpy, which reads scales as the kernels hand
them over. So what is tested is what the kernels do with tiles and with the swizzled layout; that tensor cores agree is
for a Blackwell GPU to say (tests/kernels/test_scaled_cuda.py). A tile has 128 rows, like a block of scales.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from moegraph.kernels import mx_dgrad_swiglu, mx_rows_gemm, mx_up_swiglu
from moegraph.kernels.activation import Activation
from moegraph.kernels.config import Config
from moegraph.ops.expert_ffn import activation_slopes, gated_gradient
from moegraph.ops.mx_scales import swizzle_row_scales, swizzle_scales
from tests.kernels.cases import Ragged, ragged, relative_error
from tests.kernels.scaled_cases import grouped64, mx_quantised, mx_restored, poisoned

SMALL = Config(128, 128, 128, num_warps=4, num_stages=2)
ACTIVATIONS = {"swiglu": Activation(), "clamped": Activation(True, 1.7, 0.8)}
SIZES = [((0, 1, 127, 128, 129), 9), ((0, 0), 9), ((200, 0), 0)]
CASES = [pytest.param(ragged(*each), id=f"{each[0]}+{each[1]}") for each in SIZES]
BOUND = 6e-3


def _dequantised(data: Any, scale: Any) -> Any:
    values = torch.from_numpy(data.handle.data.copy()).view(torch.float8_e4m3fn).float().numpy()
    return values, np.exp2(scale.handle.data.astype(np.float32) - 127).repeat(32, 1)


def _dot_scaled(self: Any, a: Any, sa: Any, a_format: str, b: Any, sb: Any, b_format: str, acc: Any, *rest: Any) -> Any:
    """a [M, K] with scales [M, K/32], b [K, N] with scales [N, K/32], the accumulator [M, N]."""
    assert (a_format, b_format) == ("e4m3", "e4m3")
    (left, by_row), (right, by_column) = _dequantised(a, sa), _dequantised(b, sb)
    total = (left * by_row) @ (right * by_column.T) + acc.handle.data
    return self.tensor(interpreter.TensorHandle(total.astype(np.float32), acc.handle.dtype.scalar), acc.type)


@pytest.fixture(autouse=True)
def dot_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TritonSemantic, "dot_scaled", _dot_scaled)


def operands(case: Ragged, k: int, n: int) -> tuple[dict[str, Tensor], Tensor]:
    """(the arguments of a kernel, NaN in what does not exist; their product in float64)."""
    torch.manual_seed(0)
    real = case.rows - case.tail
    rows, row_scale = mx_quantised(torch.randn(case.rows, k) * torch.exp(torch.randn(case.rows, 1)))
    weight, weight_scale = mx_quantised(torch.randn(len(case.sizes), n, k) * torch.exp(torch.randn(n, k)))
    want = grouped64(mx_restored(rows, row_scale), mx_restored(weight, weight_scale), case)
    scales = swizzle_row_scales(poisoned(row_scale, real), case.offsets)
    scales[128 * sum(-(-size // 128) for size in case.sizes) :] = 255  # blocks of no expert
    made = {
        "rows": poisoned(rows, real),
        "row_scale": scales,
        "weight": weight,
        "weight_scale": swizzle_scales(weight_scale),
    }
    return {**made, "offsets": case.offsets}, want


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("k", "n"), [(128, 128), (288, 144)])
@pytest.mark.parametrize(("parts", "block_n", "full"), [(1, 128, False), (2, 256, True)])
def test_the_product(case: Ragged, k: int, n: int, parts: int, block_n: int, full: bool) -> None:
    p, want = operands(case, k, n)
    options: dict[str, Any] = {"config": replace(SMALL, block_n=block_n, parts=parts)}
    real = case.rows - case.tail
    if full:
        options |= {"bias": torch.randn(len(case.sizes), n).bfloat16(), "row_weight": torch.rand(case.rows)}
        want[:real] += options["bias"][case.expert_of_row].double()
        want *= options["row_weight"].double()[:, None]
    have = mx_rows_gemm.mx_grouped_mm(*p.values(), **options)
    assert relative_error(have, want) < BOUND
    assert not have[real:].any()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("name", "biased", "parts"), [("swiglu", False, 1), ("clamped", True, 2)])
def test_the_up_projection_and_its_activation(case: Ragged, name: str, biased: bool, parts: int) -> None:
    (p, want), activation, real = operands(case, 160, 256), ACTIVATIONS[name], case.rows - case.tail
    bias = torch.randn(len(case.sizes), 256).bfloat16() if biased else None
    config = replace(SMALL, block_n=256, parts=parts)
    z, act = mx_up_swiglu.mx_up_swiglu(*p.values(), bias=bias, activation=activation, config=config)
    if bias is not None:
        want[:real] += bias[case.expert_of_row].double()
    assert relative_error(z, want) < BOUND
    limit = activation.limit if activation.clamped else 0.0
    assert relative_error(act, activation_slopes(z.double(), activation.alpha, limit)[0]) < BOUND
    assert not z[real:].any()
    assert not act[real:].any()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("name", "kind"), [("swiglu", "2"), ("clamped", "separate")])
def test_the_gradient_through_down_and_activation(case: Ragged, name: str, kind: str) -> None:
    (p, want), activation, real = operands(case, 160, 128), ACTIVATIONS[name], case.rows - case.tail
    config = replace(SMALL, separate=True) if kind == "separate" else replace(SMALL, parts=int(kind))
    z, row_weight = torch.randn(case.rows, 256).bfloat16(), torch.rand(case.rows)
    tensors = (*list(p.values())[:4], poisoned(z, real), poisoned(row_weight, real), case.offsets)
    have = mx_dgrad_swiglu.mx_dgrad_swiglu(*tensors, activation=activation, config=config)
    limit = activation.limit if activation.clamped else 0.0
    expected = gated_gradient(want, z.double(), row_weight.double(), case.offsets, activation.alpha, limit)
    for mine, true in zip(have, expected, strict=True):
        assert relative_error(mine, true) < 2 * BOUND
        assert not mine[real:].any()
