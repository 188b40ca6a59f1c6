"""MXFP8 bit for bit: against exact fractions, against torchao, and every code that can be decoded."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx

from moegraph.ops.mx_format import ROUNDINGS, decode_scale, mx_dequantize, mx_quantize
from tests.ops import exact_mx

TORCHAO = {"rceil": ScaleCalculationMode.RCEIL, "floor": ScaleCalculationMode.FLOOR}
NAN, INF = math.nan, math.inf


def same_bytes(have: Tensor, want: Tensor) -> bool:
    return torch.equal(have.view(torch.uint8), want.view(torch.uint8))


def block(*values: float) -> Tensor:
    return torch.tensor([*values, *[0.0] * (32 - len(values))])[None]


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_awkward_blocks_are_those_of_exact_fractions(dtype: torch.dtype, rounding: str) -> None:
    x = exact_mx.adversarial().to(dtype)
    assert x.shape[0] > 300
    codes, scale = exact_mx.quantize_rows(x, rounding)
    have, have_scale = mx_quantize(x, rounding=rounding)
    assert same_bytes(have_scale[:, 0], scale)
    assert same_bytes(have, codes)
    have, have_scale = mx_quantize(x.t().contiguous(), -2, rounding=rounding)
    assert same_bytes(have_scale[0], scale)
    assert same_bytes(have.t().contiguous(), codes)


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_random_bits_are_those_of_exact_fractions(rounding: str) -> None:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (64, 32), generator=generator, dtype=torch.int64)
    narrow = torch.randn(64, 32, generator=generator)
    for x in (bits.to(torch.int32).view(torch.float32), narrow):
        codes, scale = exact_mx.quantize_rows(x, rounding)
        have, have_scale = mx_quantize(x, rounding=rounding)
        assert same_bytes(have_scale[:, 0], scale)
        assert same_bytes(have, codes)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torchao_gives_the_same_bytes(dtype: torch.dtype, rounding: str) -> None:
    """torchao takes a rounded logarithm of a rounded quotient: in fp32 an amax a few ulp above 448 · 2^k is another
    block there, so fp32 has random blocks only. bf16 has no such amax. NaN has several codes."""
    if dtype == torch.bfloat16:
        x = exact_mx.adversarial().to(dtype)
    else:
        x = (
            torch.randn(512, 32, generator=torch.Generator().manual_seed(0))
            * 10.0 ** torch.arange(-36, 28).repeat(8)[:, None].double().float()
        )
    scale, data = to_mx(x, torch.float8_e4m3fn, 32, TORCHAO[rounding])
    have, have_scale = mx_quantize(x, rounding=rounding)
    assert same_bytes(have_scale, scale)
    nan = data.float().isnan()
    assert torch.equal(have.float().isnan(), nan)
    assert torch.equal(have.view(torch.uint8)[~nan], data.view(torch.uint8)[~nan])


SPECIAL = [  # rounding, elements, scale, bytes
    ("rceil", (0.0, -0.0), 0, (0, 0x80)),
    ("floor", (0.0, -0.0), 0, (0, 0x80)),
    ("rceil", (1.0, NAN, -0.0), 255, (0x7F, 0x7F, 0x7F, 0x7F)),
    ("floor", (1.0, NAN, -0.0), 255, (0, 0x7F, 0x80, 0)),
    ("rceil", (INF, 1.0, -1e30), 254, (126, 0, 0x80)),
    ("floor", (-INF, 1.0, -1e30), 247, (254, 0, 0x80)),
    ("rceil", (449.0, 1.0), 128, (118, 48)),
    ("floor", (449.0, 1.0), 127, (126, 56)),
    ("rceil", (448.0, -1.0), 127, (126, 0xB8)),
    ("rceil", (1e-40, -1e-40), 0, (0, 0x80)),
    ("floor", (1e-40, -1e-40), 0, (4, 0x84)),
    ("rceil", (3.4028234663852886e38,), 247, (120,)),
]


@pytest.mark.parametrize(("rounding", "elements", "scale", "codes"), SPECIAL)
def test_blocks_out_of_the_ordinary(
    rounding: str, elements: tuple[float, ...], scale: int, codes: tuple[int, ...]
) -> None:
    data, found = mx_quantize(block(*elements), rounding=rounding)
    assert found.tolist() == [[scale]]
    assert data.view(torch.uint8)[0, : len(codes)].tolist() == list(codes)


def test_infinity_and_nan_are_seen_after_decoding() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for rounding in ROUNDINGS:
            assert mx_dequantize(*mx_quantize(block(1.0, NAN), rounding=rounding), dtype).isnan().all()
            decoded = mx_dequantize(*mx_quantize(block(-INF, 1.0), rounding=rounding), dtype)
            assert decoded[0, :2].tolist() == [-INF, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_scale_and_every_element_decode_right(dtype: torch.dtype) -> None:
    scale = torch.arange(256, dtype=torch.uint8)
    codes = torch.arange(256, dtype=torch.uint8)
    data = codes.repeat(256, 1).view(torch.float8_e4m3fn)
    have = mx_dequantize(data, scale[:, None].expand(256, 8).contiguous(), dtype)
    assert have.dtype == dtype
    values = [float(exact_mx.element(c & 127)) if c & 127 < 127 else NAN for c in range(256)]
    signed = torch.tensor([-v if c > 127 else v for c, v in enumerate(values)], dtype=torch.float64)
    scales = torch.tensor([2.0 ** (b - 127) if b < 255 else NAN for b in range(256)], dtype=torch.float64)
    want = (scales[:, None] * signed).to(torch.float32).to(dtype)
    assert torch.equal(have.nan_to_num(7.0, INF, -INF), want.nan_to_num(7.0, INF, -INF))
    assert torch.equal(have.isnan(), want.isnan())
    assert decode_scale(scale[:1]).item() == 2.0**-127
    assert decode_scale(scale[255:]).isnan().all()


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize(("rounding", "at_least"), [("rceil", 31.0), ("floor", 30.0)])
def test_noise_of_a_round_trip(rounding: str, at_least: float, axis: int) -> None:
    x = torch.randn(3, 256, 512, generator=torch.Generator().manual_seed(0))
    data, scale = mx_quantize(x, axis, rounding=rounding)
    assert scale.shape == ((3, 256, 16) if axis == -1 else (3, 8, 512))
    error = x - mx_dequantize(data, scale, torch.float32, axis)
    assert 10 * torch.log10(x.square().sum() / error.square().sum()) >= at_least


def test_what_was_quantised_is_quantised_to_itself() -> None:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    once = mx_dequantize(*mx_quantize(x))
    assert torch.equal(mx_dequantize(*mx_quantize(once)), once)


@pytest.mark.parametrize(("shape", "axis", "said"), [((3, 44), -1, "44"), ((33, 64), -2, "33")])
def test_a_length_that_32_does_not_divide_is_refused(shape: tuple[int, int], axis: int, said: str) -> None:
    with pytest.raises(ValueError, match=f"{said} along axis {axis} .* multiple of 32"):
        mx_quantize(torch.zeros(shape), axis)


def test_what_else_is_refused() -> None:
    with pytest.raises(ValueError, match="float64"):
        mx_quantize(torch.zeros(32, 32, dtype=torch.float64))
    with pytest.raises(ValueError, match="rceil, floor"):
        mx_quantize(torch.zeros(32, 32), rounding="ceil")
    with pytest.raises(ValueError, match="axis 0"):
        mx_quantize(torch.zeros(32, 32), 0)
    with pytest.raises(ValueError, match="axis -2"):
        mx_quantize(torch.zeros(32), -2)
    data, scale = mx_quantize(torch.zeros(64, 32))
    with pytest.raises(ValueError, match=r"\(64, 1\), not \(2, 32\)"):
        mx_dequantize(data, scale.reshape(2, 32))
