"""Kernels that quantise, bit for bit the plain formulas. Subnormals are in fp32: the interpreter misreads bf16's."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from moegraph.benchmarks.quantize import CONFIGS, sweep_quantize
from moegraph.kernels import e4m3, fp8_quantize, mx_dequantize, mx_quantize, padded_offsets
from moegraph.kernels.config import Config
from moegraph.kernels.tiles import tile_schedule
from moegraph.ops import fp8_format, mx_format, mx_scales
from moegraph.ops.mx_format import to_e4m3
from tests.everyday import everyday
from tests.kernels.cases import ragged
from tests.kernels.quantize_cases import awkward, fp8, mismatch, mx_matrices, mx_ragged
from tests.ops import exact_mx

DTYPES = [torch.float32, torch.bfloat16]


@triton.jit
def cast_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n, other=0.0)
    tl.store(out_ptr + i, e4m3.to_e4m3(x, False), mask=i < n)


def test_the_computed_cast_rounds_as_torch_does() -> None:
    """Every fp32 whose low 12 bits are 0, 1, 0x800 or 0xFFF: all ties, and what is next to them."""
    high = torch.arange(2**20, dtype=torch.int64)[:, None] << 12
    bits = (high | torch.tensor([0, 1, 0x800, 0xFFF])).flatten()
    x = bits.where(bits < 2**31, bits - 2**32).to(torch.int32).view(torch.float32)
    x = x[~x.isnan()]
    out = torch.empty(x.shape, dtype=torch.uint8)
    cast_kernel[(triton.cdiv(x.numel(), 2**18),)](x, out, x.numel(), 2**18)
    assert not e4m3.on_hardware()
    assert mismatch(out, to_e4m3(x).view(torch.uint8)) == ""


@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((2, 96, 160), torch.float32),
        ((160, 32), torch.bfloat16),
        ((0, 32), torch.float32),
        ((0, 32, 32), torch.float32),
    ],
)
def test_mx_of_matrices(shape: tuple[int, ...], dtype: torch.dtype, swizzled: bool) -> None:
    x = awkward(*shape, dtype=dtype, subnormal=dtype == torch.float32)
    have = mx_quantize.mx_quantize(x, rows=True, columns=True, swizzled=swizzled)
    for name, a, b in zip(have._fields, have, mx_matrices(x, swizzled), strict=True):
        assert mismatch(a, b) == "", name


@pytest.mark.parametrize("swizzled", [False, True])
def test_mx_along_one_axis(swizzled: bool) -> None:
    case = ragged((0, 33, 1))
    x = awkward(case.rows, 64, dtype=torch.float32)
    want = mx_ragged(x, case.offsets, swizzled)
    rows = mx_quantize.mx_quantize(x, case.offsets, swizzled=swizzled)
    columns = mx_quantize.mx_quantize(x, case.offsets, rows=False, columns=True, swizzled=swizzled)
    assert rows[2:] == columns[:2] == (None, None)
    for a, b in zip((*rows[:2], *columns[2:]), want, strict=True):
        assert mismatch(a, b) == ""


def test_mx_restored() -> None:
    """Every element of the format with the scales at both ends, in the middle, and NaN; and what a quantiser made. The
    interpreter knows no subnormals of bf16, and no NaN among elements, which a quantiser makes with the scale NaN."""
    data = torch.arange(256, dtype=torch.uint8).repeat(6, 1)
    data = torch.where(data & 0x7F == 0x7F, 0, data).view(torch.float8_e4m3fn)
    scale = torch.tensor([0, 1, 119, 127, 254, 255], dtype=torch.uint8)[:, None].repeat(1, 8)
    out = torch.empty(6, 256)
    mx_dequantize.mx_dequantize_launch(data, scale, out).run()
    assert mismatch(out, mx_format.mx_dequantize(data, scale, torch.float32)) == ""
    made = mx_format.mx_quantize(torch.randn(33, 160) * torch.exp(3 * torch.randn(33, 1)))
    assert mismatch(mx_dequantize.mx_dequantize(*made), mx_format.mx_dequantize(*made)) == ""


# sizes, rows past the last offset, columns, dtype
RAGGED = [
    ((0, 1, 31, 32, 33), 5, 160, torch.bfloat16),
    ((127, 128, 129), 0, 160, torch.float32),
    ((0, 0, 260, 0), 140, 32, torch.bfloat16),
    ((0, 0), 0, 32, torch.float32),
    ((0, 0), 3, 32, torch.float32),
]


@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize(("sizes", "tail", "columns", "dtype"), RAGGED)
def test_mx_of_ragged_rows(sizes: tuple[int, ...], tail: int, columns: int, dtype: torch.dtype, swizzled: bool) -> None:
    case = ragged(sizes, tail)
    x = awkward(case.rows, columns, dtype=dtype, subnormal=dtype == torch.float32)
    x[sum(sizes) :] = float("nan")
    have = mx_quantize.mx_quantize(x, case.offsets, rows=True, columns=True, swizzled=swizzled)
    for name, a, b in zip(have._fields, have, mx_ragged(x, case.offsets, swizzled), strict=True):
        assert mismatch(a, b) == "", name


@pytest.mark.parametrize(("sizes", "tail", "columns", "dtype"), RAGGED)
def test_fp8_of_ragged_rows(sizes: tuple[int, ...], tail: int, columns: int, dtype: torch.dtype) -> None:
    case = ragged(sizes, tail)
    x = awkward(case.rows, columns, dtype=dtype, subnormal=dtype == torch.float32)
    x[sum(sizes) :] = float("nan")
    have = (
        *fp8_quantize.fp8_quantize_rows(x, case.offsets),
        *fp8_quantize.fp8_quantize_columns_t(x, case.offsets),
        padded_offsets.padded_offsets(case.offsets),
    )
    for a, b in zip(have, fp8(x, case.offsets), strict=True):
        assert mismatch(a, b) == ""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7, 31), (2, 3, 4104), (5, 8200), (2, 0, 32)])
def test_fp8_of_rows_short_and_long(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """A row of 8200 elements is read twice, 8192 at a time; the largest may be in either part."""
    x = awkward(*shape, dtype=dtype, subnormal=dtype == torch.float32)
    x = x.nan_to_num(1.0, 2.0, 3.0)
    x[..., 1::2, -1] = 2 * x[..., 1::2, :].abs().amax(-1)
    for a, b in zip(fp8_quantize.fp8_quantize_rows(x), fp8_format.quantize_rows(x), strict=True):
        assert mismatch(a, b) == ""


def test_fp8_of_the_smallest_magnitudes() -> None:
    x = torch.tensor([[1e-45, -0.0, 0.0], [1e-38, -1e-39, 0.0], [0.0, -0.0, 0.0]])
    for a, b in zip(fp8_quantize.fp8_quantize_rows(x), fp8_format.quantize_rows(x), strict=True):
        assert mismatch(a, b) == ""


def test_mx_of_awkward_blocks_is_that_of_exact_fractions() -> None:
    x = exact_mx.adversarial()
    codes, scale = exact_mx.quantize_rows(x, "rceil")
    found = mx_quantize.mx_quantize(x)
    assert mismatch(found.row_data.view(torch.uint8), codes) == ""
    assert mismatch(found.row_scale[:, 0], scale) == ""
    found = mx_quantize.mx_quantize(x.t().contiguous(), rows=False, columns=True)
    assert mismatch(found.column_data.view(torch.uint8).t(), codes) == ""
    assert mismatch(found.column_scale[0], scale) == ""


def test_padded_offsets_of_many_experts() -> None:
    sizes = torch.randint(0, 300, (1000,), generator=torch.Generator().manual_seed(0))
    offsets = sizes.cumsum(0).to(torch.int32)
    assert mismatch(padded_offsets.padded_offsets(offsets), mx_scales.padded_offsets(offsets)) == ""


@pytest.mark.parametrize(("block_n", "num_warps"), everyday([(256, 2), (64, 1)]))
def test_every_width_of_a_program_gives_the_same_bits(block_n: int, num_warps: int) -> None:
    case = ragged((5, 0, 33))
    x = awkward(case.rows, 160, dtype=torch.float32)
    for swizzled in (False, True):
        out = mx_quantize.empty_quantized(x, 3, rows=True, columns=True, swizzled=swizzled)
        schedule = tile_schedule(case.offsets, case.rows, 128, tail=True)
        config = Config(block_n=block_n, num_warps=num_warps)
        mx_quantize.mx_quantize_launch(x, out, case.offsets, schedule, swizzled=swizzled, config=config).run()
        for name, a, b in zip(out._fields, out, mx_ragged(x, case.offsets, swizzled), strict=True):
            assert mismatch(a, b) == "", name


@pytest.mark.slow
def test_a_sweep_times_every_configuration_along_every_axis() -> None:
    sizes = {"rows": 4, "columns": 128, "num_experts": 1, "dtype": torch.float32}
    found = sweep_quantize(torch.device("cpu"), **sizes, configs=CONFIGS[:2], repeats=1)
    wanted = {
        f"mx {axes}, {config.block_n} columns, warps {config.num_warps}"
        for axes in ("rows", "columns", "both")
        for config in CONFIGS[:2]
    }
    assert found.keys() == {"copy", *wanted}
    assert all(rate > 0 for rate in found.values())
