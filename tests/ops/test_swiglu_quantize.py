"""Activations that are quantised as they are made: the bits of `pointwise` and then of a quantiser; what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moegraph import ops
from moegraph.ops.pointwise import swiglu_backward, swiglu_clamped_backward
from moegraph.ops.swiglu_quantize import swiglu_backward_quantized, swiglu_kept_quantized, swiglu_quantized
from tests.kernels.cases import ragged

CASE = ragged((0, 1, 31, 130), 9)
REAL = CASE.rows - CASE.tail
F = 128
ACTIVATIONS = [(0.0, 0.0), (1.7, 0.8)]


def quantised(x: Tensor, offsets: Tensor | None, scales: str) -> tuple[Tensor, Tensor]:
    if scales == "mx":
        return ops.mx_quantize_rows(x, offsets, swizzled=True)
    return ops.fp8_quantize_rows(x, offsets) if scales == "fp8" else ops.fp8_quantize_blocks(x, offsets)


def same(have: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(have, want, strict=True))


@pytest.mark.parametrize(("alpha", "limit"), ACTIVATIONS)
@pytest.mark.parametrize(
    ("scales", "offsets"), [("mx", CASE.offsets), ("mx", None), ("fp8", CASE.offsets), ("blocks", CASE.offsets)]
)
def test_it_has_the_bits_of_two_operators(scales: str, offsets: Tensor | None, alpha: float, limit: float) -> None:
    torch.manual_seed(0)
    z = (torch.randn(CASE.rows, 2 * F) * torch.exp(torch.randn(CASE.rows, 2 * F))).bfloat16()
    grad = torch.randn(CASE.rows, F).bfloat16()
    if offsets is not None:
        z[REAL:], grad[REAL:] = 0, 0  # as products leave them
    act = ops.swiglu_clamped(z, alpha=alpha, limit=limit) if limit else ops.swiglu(z)
    want = quantised(act, offsets, scales)
    assert same(swiglu_quantized(z, offsets, alpha, limit, scales), want)
    assert same(swiglu_kept_quantized(z, offsets, alpha, limit, scales), (act, *want))
    dz = swiglu_clamped_backward(grad, z, alpha, limit) if limit else swiglu_backward(grad, z)
    have = swiglu_backward_quantized(grad, z, offsets, alpha, limit, scales)
    assert same(have, (dz, *quantised(dz, offsets, scales)))


def test_rows_past_the_last_offset_are_zeros_and_not_read() -> None:
    z, grad = torch.randn(CASE.rows, 2 * F), torch.randn(CASE.rows, F)
    z[REAL:], grad[REAL:] = float("nan"), float("nan")
    for scales in ("mx", "fp8", "blocks"):
        act, data, _ = swiglu_kept_quantized(z, CASE.offsets, 0.0, 0.0, scales)
        dz, dz_data, _ = swiglu_backward_quantized(grad, z, CASE.offsets, 0.0, 0.0, scales)
        for each in (act, data.view(torch.uint8), dz, dz_data.view(torch.uint8)):
            assert not each[REAL:].any()
            assert each[:REAL].any()


def test_other_shapes_and_names_are_refused() -> None:
    z = torch.randn(4, 96)
    with pytest.raises(ValueError, match=r"swiglu_quantized: \[4, 96\] is not .* F of whole blocks of 32"):
        swiglu_quantized(z, None, 0.0, 0.0, "mx")
    with pytest.raises(ValueError, match="whole blocks of 128"):
        swiglu_kept_quantized(z, None, 0.0, 0.0, "blocks")
    with pytest.raises(ValueError, match="scales 'e5m2' are not one of mx, fp8, blocks"):
        swiglu_quantized(z, None, 0.0, 0.0, "e5m2")
    with pytest.raises(ValueError, match=r"\[4, 96\] are not gradients of \[4, 96\]"):
        swiglu_backward_quantized(z, z, None, 0.0, 0.0, "fp8")
