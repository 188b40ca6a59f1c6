"""The activation and its gradient with their 8-bit form, in the interpreter: 16 bits against the operators' formulas,
8 bits bit for bit against a quantiser of those 16."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor

from moegraph import ops
from moegraph.kernels.activation import Activation
from moegraph.kernels.gated_backward import gated_backward_launch
from moegraph.kernels.gated_forward import gated_forward
from moegraph.kernels.gated_gradient import gated_gradient
from moegraph.kernels.quantized_rows import empty_rows
from moegraph.ops.pointwise import swiglu_backward, swiglu_clamped_backward
from tests.kernels.cases import Ragged, ragged, relative_error
from tests.kernels.quantize_cases import mismatch
from tests.kernels.scaled_cases import poisoned

RUNS, FEW, NONE = ragged((0, 1, 15, 130), 9), ragged((0, 2, 1), 2), ragged((0, 0), 3)
CLAMPED = Activation(True, 1.7, 0.8)


def inputs(case: Ragged, f: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """z and gradients of its activation; rows that do not exist are NaN."""
    torch.manual_seed(f)
    real = case.rows - case.tail
    z = (torch.randn(case.rows, 2 * f) * torch.exp(torch.randn(case.rows, 2 * f))).to(dtype)
    return poisoned(z, real), poisoned(torch.randn(case.rows, f).to(dtype), real)


def quantised(x: Tensor, offsets: Tensor | None, scales: str) -> tuple[Tensor, Tensor]:
    if scales == "mx":
        return ops.mx_quantize_rows(x, offsets, swizzled=True)
    return ops.fp8_quantize_rows(x, offsets) if scales == "fp8" else ops.fp8_quantize_blocks(x, offsets)


def nearly(have: Tensor, want: Tensor) -> bool:
    """Equal but for the last bits of fp32, or of bf16, which the interpreter cuts off where a chip rounds."""
    return relative_error(have, want) < (6e-3 if have.dtype == torch.bfloat16 else 1e-6)


@pytest.mark.parametrize("activation", [Activation(), pytest.param(CLAMPED, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("case", "scales", "f"),
    [
        (RUNS, "mx", 96),
        (FEW, "mx", 1056),
        (RUNS, "fp8", 80),
        (FEW, "fp8", 1056),
        (FEW, "blocks", 1152),
        (NONE, "mx", 32),
    ],
)
def test_the_activation_and_its_gradient(
    case: Ragged, scales: str, f: int, dtype: torch.dtype, activation: Activation
) -> None:
    """More than 1024 columns are two chunks; the second has columns that do not exist."""
    real, (z, da) = case.rows - case.tail, inputs(case, f, dtype)
    act, *in_8_bits = gated_forward(z, case.offsets, scales, kept=True, activation=activation)
    assert act is not None
    exists, limit = z[:real], activation.limit
    want = ops.swiglu_clamped(exists, alpha=activation.alpha, limit=limit) if limit else ops.swiglu(exists)
    assert nearly(act[:real], want)
    assert not act[real:].any()
    for have, expected in zip(in_8_bits, quantised(act, case.offsets, scales), strict=True):
        assert mismatch(have, expected) == ""
    alone = gated_forward(z, case.offsets, scales, kept=False, activation=activation)
    assert alone[0] is None
    assert all(mismatch(a, b) == "" for a, b in zip(alone[1:], in_8_bits, strict=True))
    dz, *in_8_bits = gated_gradient(da, z, case.offsets, scales, activation=activation)
    if limit:
        want = swiglu_clamped_backward(da[:real], exists, activation.alpha, limit)
    else:
        want = swiglu_backward(da[:real], exists)
    assert nearly(dz[:real], want)
    assert not dz[real:].any()
    for have, expected in zip(in_8_bits, quantised(dz, case.offsets, scales), strict=True):
        assert mismatch(have, expected) == ""


def test_the_clamped_activation_every_day() -> None:
    test_the_activation_and_its_gradient(FEW, "mx", 96, torch.bfloat16, CLAMPED)


@pytest.mark.parametrize("name", ["mx", "blocks"])
def test_the_gradient_with_the_router_weight_is_quantised_as_it_is_stored(name: Literal["mx", "blocks"]) -> None:
    z, da = inputs(RUNS, 128, torch.bfloat16)
    weight, ds = torch.rand(RUNS.rows), torch.empty(RUNS.rows)
    dz, act, in_8_bits = torch.empty_like(z), torch.empty_like(da), empty_rows(z, *z.shape, len(RUNS.sizes), name)
    gated_backward_launch(da, z, weight, RUNS.offsets, dz, act, ds, in_8_bits, name=name).run()
    assert dz.any()
    for have, want in zip(in_8_bits, quantised(dz, RUNS.offsets, name), strict=True):
        assert mismatch(have, want) == ""


def test_without_offsets_all_rows_exist() -> None:
    torch.manual_seed(0)
    z, da = torch.randn(150, 192).bfloat16(), torch.randn(150, 96).bfloat16()
    act, *in_8_bits = gated_forward(z, None, "mx", kept=True)
    dz, *gradients = gated_gradient(da, z, None, "mx")
    assert act is not None
    for wide, low in ((act, in_8_bits), (dz, gradients)):
        assert all(mismatch(a, b) == "" for a, b in zip(low, quantised(wide, None, "mx"), strict=True))
