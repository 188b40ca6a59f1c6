"""Operators that quantise: experts by themselves, rows that do not exist, sizes, and FP8 against exact fractions."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from moegraph import ops
from moegraph.ops import mx_scales
from moegraph.ops.mx_format import BLOCK
from tests.ops.exact_mx import nearest

COUNTS = (1, 31, 32, 33, 0, 44, 64, 3)  # a group that 32 does not divide fails elsewhere
SIZES = [COUNTS, (0, 1, 127, 128, 129), (0, 0, 300, 0), (0, 0)]
K = 96


def ragged(sizes: tuple[int, ...], tail: int = 9, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """x [R, K] whose rows past the last offset are NaN, and offsets [E]."""
    offsets = torch.tensor(sizes).cumsum(0).to(torch.int32)
    x = torch.randn(sum(sizes) + tail, K, generator=torch.Generator().manual_seed(0))
    x[sum(sizes) :] = math.nan
    return x.to(dtype), offsets


def runs(sizes: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """(first row, size, first padded row) of every expert."""
    found, first, at = [], 0, 0
    for size in sizes:
        found.append((first, size, at))
        first, at = first + size, at + -(-size // 128) * 128
    return found


def same(have: Tensor, want: Tensor) -> bool:
    if have.dtype == torch.float8_e4m3fn:
        return torch.equal(have.view(torch.uint8), want.contiguous().view(torch.uint8))
    return torch.equal(have, want)


@pytest.mark.parametrize("sizes", SIZES)
def test_a32_rows_of_any_count_per_expert(sizes: tuple[int, ...]) -> None:
    x, offsets = ragged(sizes)
    data, scale = ops.mx_quantize_rows(x, offsets)
    real = sum(sizes)
    want, want_scale = ops.mx_quantize(x[:real])
    assert same(data[:real], want)
    assert same(scale[:real], want_scale)
    assert not data[real:].view(torch.uint8).any()
    assert not scale[real:].any()
    swizzled = ops.mx_quantize_rows(x, offsets, swizzled=True)
    assert same(swizzled[0], data)
    for first, size, at in runs(sizes):
        own = swizzled[1][at : at + -(-size // 128) * 128]
        assert same(mx_scales.unswizzle_scales(own, size, K // BLOCK), want_scale[first : first + size])


@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_a32_columns_of_any_count_per_expert(sizes: tuple[int, ...], swizzled: bool) -> None:
    x, offsets = ragged(sizes)
    data, scale, padded = ops.mx_quantize_ragged_columns(x, offsets, swizzled=swizzled)
    assert data.shape == ((-(-x.shape[0] // 128) + len(sizes)) * 128, K)
    blocks = 0
    for e, (first, size, at) in enumerate(runs(sizes)):
        high = -(-size // 128) * 128
        alone = torch.zeros(high, K, dtype=x.dtype)
        alone[:size] = x[first : first + size]
        want, want_scale = ops.mx_quantize_columns(alone, swizzled=swizzled)
        assert same(data[at : at + high], want)
        if swizzled:
            have = scale.flatten()[blocks : blocks + want_scale.numel()]
            assert same(have, want_scale.flatten())
            blocks += want_scale.numel()
        else:
            assert same(scale[at // BLOCK : (at + high) // BLOCK], want_scale)
        assert padded[e] == at + high
    assert not data[int(padded[-1]) :].view(torch.uint8).any()


@pytest.mark.parametrize("swizzled", [False, True])
def test_both_are_one_and_the_other(swizzled: bool) -> None:
    x, offsets = ragged(COUNTS)
    rows, columns = ops.mx_quantize_rows(x, offsets, swizzled=swizzled), ops.mx_quantize_ragged_columns
    want = (*rows, *columns(x, offsets, swizzled=swizzled))
    found = ops.mx_quantize_ragged_both(x, offsets, swizzled=swizzled)
    assert all(same(a, b) for a, b in zip(found, want, strict=True))
    weight = torch.randn(3, 160, K, generator=torch.Generator().manual_seed(1))
    both = ops.mx_quantize_both(weight, swizzled=swizzled)
    want = (*ops.mx_quantize_rows(weight, swizzled=swizzled), *ops.mx_quantize_columns(weight, swizzled=swizzled))
    assert all(same(a, b) for a, b in zip(both, want, strict=True))
    assert both[1].shape == ((3, 256, 4) if swizzled else (3, 160, 3))
    assert both[3].shape == ((3, 128, 8) if swizzled else (3, 5, K))


def test_a33_zero_rows_and_zero_experts_stay_zero() -> None:
    x = torch.zeros(40, K)
    offsets = torch.tensor([40], dtype=torch.int32)
    for tensor in (*ops.mx_quantize_ragged_both(x, offsets)[:4], ops.fp8_quantize_rows(x)[0]):
        assert not tensor.view(torch.uint8).any()
    assert (ops.fp8_quantize_rows(x)[1] == 1).all()
    data, scale, _ = ops.fp8_quantize_columns_t(x, offsets)
    assert not data.view(torch.uint8).any()
    assert (scale == 1).all()


def exact_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of finite fp32 values that share a scale each → (codes, scales), the quotients rounded to fp32 once."""
    codes, scales = [], []
    for row in x.tolist():
        amax = max(abs(v) for v in row)
        factor = torch.tensor(448 / amax, dtype=torch.float64).float().item() if amax else 1.0
        scales.append(amax / 448 if amax else 1.0)
        products = [torch.tensor(v * factor, dtype=torch.float64).float().item() for v in row]
        codes.append([nearest(abs(Fraction(p))) | (math.copysign(1, p) < 0) << 7 for p in products])
    return torch.tensor(codes, dtype=torch.uint8), torch.tensor(scales, dtype=torch.float64).float()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fp8_rows_are_those_of_exact_fractions(dtype: torch.dtype) -> None:
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.arange(-20, 20)[:, None]
    x[3], x[4, :8] = 0.0, -0.0
    x = x.to(dtype)
    codes, scales = exact_fp8(x)
    data, scale = ops.fp8_quantize_rows(x.reshape(4, 10, 64))
    assert same(data.reshape(40, 64), codes.view(torch.float8_e4m3fn))
    assert torch.equal(scale, scales.reshape(4, 10))


def test_fp8_rows_past_the_last_offset_are_zero() -> None:
    x, offsets = ragged(COUNTS)
    data, scale = ops.fp8_quantize_rows(x, offsets)
    real = sum(COUNTS)
    want, want_scale = ops.fp8_quantize_rows(x[:real])
    assert same(data[:real], want)
    assert torch.equal(scale[:real], want_scale)
    assert not data[real:].view(torch.uint8).any()
    assert (scale[real:] == 1).all()


@pytest.mark.parametrize("sizes", SIZES)
def test_fp8_columns_of_each_expert_are_rows_of_its_transpose(sizes: tuple[int, ...]) -> None:
    x, offsets = ragged(sizes)
    data, scale, padded = ops.fp8_quantize_columns_t(x, offsets)
    want = torch.zeros(K, (-(-x.shape[0] // 128) + len(sizes)) * 128, dtype=torch.uint8)
    for e, (first, size, at) in enumerate(runs(sizes)):
        own = x[first : first + size].t().float()
        codes, scales = exact_fp8(own) if size else (want[:, :0], torch.ones(K))
        want[:, at : at + size] = codes
        assert torch.equal(scale[e], scales)
        assert padded[e] == at + -(-size // 128) * 128
    assert same(data, want.view(torch.float8_e4m3fn))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_fp8_that_is_not_finite_is_nan_wherever_it_shares_a_scale(bad: float) -> None:
    x, offsets = ragged((20, 30), tail=0)
    x[25, 3] = bad
    data, scale = ops.fp8_quantize_rows(x)
    assert scale.isnan().nonzero().tolist() == [[25]]
    assert (data[25].view(torch.uint8) == 0x7F).all()
    data, scale, _ = ops.fp8_quantize_columns_t(x, offsets)
    assert scale.isnan().nonzero().tolist() == [[1, 3]]
    assert data.float().isnan().sum() == 30
    assert (data[3, 128:158].view(torch.uint8) == 0x7F).all()


def test_fp8_of_the_smallest_magnitudes_is_finite() -> None:
    x = torch.tensor([[1e-45, -0.0, 0.0], [1e-38, -1e-39, 0.0]])
    data, scale = ops.fp8_quantize_rows(x)
    assert data.float().isfinite().all()
    assert scale.isfinite().all()


def test_what_is_refused_is_refused_when_traced_too() -> None:
    from torch._subclasses import FakeTensorMode

    offsets = torch.tensor([8], dtype=torch.int32)
    calls = [
        (lambda x: ops.mx_quantize_rows(x), (8, 44), "44 along axis -1"),
        (lambda x: ops.mx_quantize_columns(x), (44, 8), "44 along axis -2"),
        (lambda x: ops.mx_quantize_both(x), (32, 44), "44 along axis -1"),
        (lambda x: ops.mx_quantize_rows(x.double()), (8, 64), "float64"),
        (lambda x: ops.mx_quantize_ragged_columns(x.double(), offsets), (8, 64), "float64"),
        (lambda x: ops.fp8_quantize_rows(x.double()), (8, 64), "float64"),
        (lambda x: ops.fp8_quantize_columns_t(x.double(), offsets), (8, 64), "float64"),
    ]
    for call, shape, said in calls:
        with pytest.raises(ValueError, match=said):
            call(torch.zeros(shape))
        with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(ValueError, match=said):
            call(torch.zeros(shape))


@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("name", ["mx_quantize_rows", "mx_quantize_columns", "fp8_quantize_rows"])
def test_what_a_view_becomes_has_the_strides_that_the_compiler_is_told(name: str, swizzled: bool) -> None:
    turned = torch.randn(2, 64, 96).bfloat16().transpose(1, 2)  # as weights are for input gradients
    options = {"fp8_quantize_rows": (None,), "mx_quantize_rows": (None, swizzled)}.get(name, (swizzled,))
    operator = getattr(torch.ops.moegraph, name).default
    for real, fake in zip(operator(turned, *options), operator(turned.to("meta"), *options), strict=True):
        assert (real.shape, real.stride()) == (fake.shape, fake.stride())
