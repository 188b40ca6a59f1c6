"""On a GPU: activations and their gradients that are quantised as they are made, against the two operators apart."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moegraph import ops
from moegraph.ops.pointwise import swiglu_backward, swiglu_clamped_backward
from moegraph.ops.swiglu_quantize import swiglu_backward_quantized, swiglu_kept_quantized, swiglu_quantized
from tests.kernels.cases import ragged
from tests.kernels.test_scaled_cuda import SIZES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

F = 384
SHARED = [(0, 1, 31, 130), (3000, 0, 517)]


def quantised(x: Tensor, offsets: Tensor | None, scales: str) -> tuple[Tensor, Tensor]:
    if scales == "mx":
        return ops.mx_quantize_rows(x, offsets, swizzled=True)
    if scales == "fp8":
        return ops.fp8_quantize_rows(x, offsets)
    everything = torch.tensor([x.shape[0]], dtype=torch.int32, device="cuda")
    return ops.fp8_quantize_blocks(x, everything if offsets is None else offsets)


def same(have: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(have, want, strict=True))


def near(have: Tensor, want: Tensor) -> bool:
    """Equal, or neighbours in bf16: Triton's exponential is not torch's. Gradients are sums, so near zero less so."""
    return bool(((have.double() - want.double()).abs() <= 2**-7 * want.double().abs() + 2**-12).all())


@pytest.mark.parametrize("sizes", [*SIZES, *SHARED])
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("scales", ["mx", "fp8", "blocks"])
@pytest.mark.parametrize(("alpha", "limit"), [(0.0, 0.0), (1.7, 0.8)])
def test_what_is_quantised_is_what_is_stored_and_that_is_the_activation(
    sizes: tuple[int, ...], dense: bool, scales: str, alpha: float, limit: float
) -> None:
    torch.manual_seed(0)
    case = ragged(sizes, 0 if dense else 37, "cuda")
    offsets, real = None if dense else case.offsets, case.rows - case.tail
    z = (
        torch.randn(case.rows, 2 * F, device="cuda") * torch.exp(torch.randn(case.rows, 2 * F, device="cuda"))
    ).bfloat16()
    grad = torch.randn(case.rows, F, device="cuda").bfloat16()
    z[real:], grad[real:] = float("nan"), float("nan")
    act, *made = swiglu_kept_quantized(z, offsets, alpha, limit, scales)
    assert same(tuple(made), quantised(act, offsets, scales))
    assert same(swiglu_quantized(z, offsets, alpha, limit, scales), tuple(made))
    want = ops.swiglu_clamped(z, alpha=alpha, limit=limit) if limit else ops.swiglu(z)
    assert near(act[:real], want[:real])
    dz, *made = swiglu_backward_quantized(grad, z, offsets, alpha, limit, scales)
    assert same(tuple(made), quantised(dz, offsets, scales))
    want = swiglu_clamped_backward(grad, z, alpha, limit) if limit else swiglu_backward(grad, z)
    assert near(dz[:real], want[:real])
    assert not act[real:].any()
    assert not dz[real:].any()
