"""Quantising on a GPU: bit for bit the plain formulas on the CPU, for every awkward size; without waiting; and fast."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from moegraph import ops
from moegraph.benchmarks.quantize import time_quantize
from tests.kernels.cases import ragged
from tests.kernels.quantize_cases import awkward, fp8, mismatch, mx_matrices, mx_ragged
from tests.ops import exact_mx

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

# Eight experts each: a kernel is compiled for a number of experts, a width and a dtype.
SIZES = [
    (0, 1, 127, 128, 129, 300, 0, 0),
    (0, 0, 0, 0, 0, 900, 0, 0),
    (1, 31, 32, 33, 0, 44, 64, 3),
    (64,) * 8,
    (0,) * 8,
    (5, 0, 0, 0, 0, 0, 0, 0),
]
WIDTHS = [(torch.bfloat16, 2880), (torch.float32, 416), (torch.float16, 32)]

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def same(have: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    for index, (a, b) in enumerate(zip(have, want, strict=True)):
        assert mismatch(a.cpu(), b) == "", index


@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize(("dtype", "columns"), WIDTHS)
@pytest.mark.parametrize("tail", [0, 200])
@pytest.mark.parametrize("sizes", SIZES)
def test_mx_of_ragged_rows(sizes: tuple[int, ...], tail: int, dtype: torch.dtype, columns: int, swizzled: bool) -> None:
    case = ragged(sizes, tail)
    x = awkward(case.rows, columns, dtype=dtype)
    x[sum(sizes) :] = float("nan")
    there, offsets = x.cuda(), case.offsets.cuda()
    want = mx_ragged(x, case.offsets, swizzled)
    *both, padded = ops.mx_quantize_ragged_both(there, offsets, swizzled=swizzled)
    same(tuple(both), want)
    same(ops.mx_quantize_rows(there, offsets, swizzled=swizzled), want[:2])
    *found, again = ops.mx_quantize_ragged_columns(there, offsets, swizzled=swizzled)
    same(tuple(found), want[2:])
    assert torch.equal(padded, again)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
def test_fp8_in_blocks(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    case = ragged(sizes, 200)
    x = awkward(case.rows, 384, dtype=dtype)
    x[sum(sizes) :] = float("nan")
    same(ops.fp8_quantize_blocks(x.cuda(), case.offsets.cuda()), ops.fp8_quantize_blocks(x, case.offsets))
    weight = awkward(2, 144, 384, dtype=dtype)
    same(ops.fp8_quantize_blocks(weight.cuda()), ops.fp8_quantize_blocks(weight))


@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("shape", [(1, 32), (3, 160), (2, 128), (4096,), (0,)])
@pytest.mark.parametrize(("dtype", "columns"), WIDTHS)
def test_mx_of_matrices(dtype: torch.dtype, columns: int, shape: tuple[int, ...], swizzled: bool) -> None:
    x = awkward(*shape, columns, dtype=dtype)
    want = mx_matrices(x, swizzled)
    same(ops.mx_quantize_both(x.cuda(), swizzled=swizzled), want)
    same(ops.mx_quantize_rows(x.cuda(), swizzled=swizzled), want[:2])
    same(ops.mx_quantize_columns(x.cuda(), swizzled=swizzled), want[2:])


@pytest.mark.parametrize(("dtype", "columns"), [*WIDTHS, (torch.bfloat16, 8200), (torch.float32, 31)])
@pytest.mark.parametrize("tail", [0, 200])
@pytest.mark.parametrize("sizes", SIZES)
def test_fp8_of_ragged_rows(sizes: tuple[int, ...], tail: int, dtype: torch.dtype, columns: int) -> None:
    case = ragged(sizes, tail)
    x = awkward(case.rows, columns, dtype=dtype)
    x[sum(sizes) :] = float("nan")
    there, offsets = x.cuda(), case.offsets.cuda()
    have = (*ops.fp8_quantize_rows(there, offsets), *ops.fp8_quantize_columns_t(there, offsets))
    same(have, fp8(x, case.offsets))


@pytest.mark.parametrize(("dtype", "columns"), [*WIDTHS, (torch.bfloat16, 8224)])
@pytest.mark.parametrize("dropped", [0.0, 0.3, 1.0])
def test_rows_that_are_quantised_on_their_way_to_the_experts(dropped: float, dtype: torch.dtype, columns: int) -> None:
    ids = torch.randint(0, 40, (100, 4), dtype=torch.int32).clamp_max(7)  # most choose the last expert
    metadata = ops.sort_by_expert(ids.masked_fill(torch.rand(ids.shape) < dropped, -1), 8)
    x = awkward(100, columns, dtype=dtype)
    there, moved = [t.cuda() for t in metadata], ops.permute(x, *metadata, top_k=4)
    for swizzled in (False, True):
        have = ops.mx_permute_quantize(x.cuda(), *there, top_k=4, swizzled=swizzled)
        same(have, mx_ragged(moved, metadata[2], swizzled)[:2])
    same(ops.fp8_permute_quantize(x.cuda(), *there, top_k=4), fp8(moved, metadata[2])[:2])


@pytest.mark.parametrize("shape", [(33, 160), (5, 40, 32), (0, 32)])
def test_mx_back_to_bf16(shape: tuple[int, ...]) -> None:
    data, scale = ops.mx_quantize(awkward(*shape, dtype=torch.float32))
    codes = torch.arange(256, dtype=torch.uint8).repeat(6, 1).view(torch.float8_e4m3fn)
    ends = torch.tensor([0, 1, 119, 127, 254, 255], dtype=torch.uint8)[:, None].repeat(1, 8)
    for each in ((data, scale), (codes, ends)):
        have, want = ops.mx_dequantize_rows(*(t.cuda() for t in each)).cpu(), ops.mx_dequantize(*each)
        assert ((have.view(torch.int16) == want.view(torch.int16)) | (have.isnan() & want.isnan())).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_awkward_blocks_are_those_of_exact_fractions(dtype: torch.dtype) -> None:
    x = exact_mx.adversarial().to(dtype)
    codes, scale = exact_mx.quantize_rows(x, "rceil")
    data, found = ops.mx_quantize_rows(x.cuda())
    same((data.view(torch.uint8), found[:, 0]), (codes, scale))
    data, found = ops.mx_quantize_columns(x.t().contiguous().cuda())
    same((data.view(torch.uint8).t(), found[0]), (codes, scale))


def test_every_fp32_between_ties_is_rounded_by_the_chip_as_by_torch() -> None:
    """Every fp32 whose low 12 bits are 0, 1, 0x800 or 0xFFF, in blocks with 448 and no larger: scale 1."""
    bits = (torch.arange(0x43E00, dtype=torch.int32)[:, None] << 12) | torch.tensor([0, 1, 0x800, 0xFFF]).int()
    x = bits.flatten().view(torch.float32)
    blocks = torch.full((x.numel() // 16, 32), 448.0)
    blocks[:, :16] = x.reshape(-1, 16)
    blocks[:, 16:31] = -blocks[:, :15]
    data, scale = ops.mx_quantize_rows(blocks.cuda())
    assert (scale == 127).all()
    same((data, scale), ops.mx_quantize(blocks))


def test_the_plain_formulas_give_the_same_bits_on_the_device() -> None:
    case = ragged((0, 1, 127, 300), 9)
    x = awkward(case.rows, 416, dtype=torch.float32)
    there, offsets = x.cuda(), case.offsets.cuda()
    for swizzled in (False, True):
        same(mx_ragged(there, offsets, swizzled), mx_ragged(x, case.offsets, swizzled))
    same(fp8(there, offsets), fp8(x, case.offsets))


CALLS: list[Callable[..., Any]] = [
    ops.mx_quantize_rows,
    ops.mx_quantize_ragged_columns,
    ops.mx_quantize_ragged_both,
    ops.fp8_quantize_rows,
    ops.fp8_quantize_columns_t,
]


def moved(call: Callable[..., Any], x: Tensor, offsets: Tensor) -> Any:
    """A quantiser that moves rows, with two rows per token of x [T, D] in any order."""
    order = torch.arange(2 * x.shape[0], dtype=torch.int32, device=x.device).flip(0)
    return call(x, order, order, offsets, top_k=2)


CALLS += [partial(moved, partial(ops.mx_permute_quantize, swizzled=True)), partial(moved, ops.fp8_permute_quantize)]


@pytest.mark.parametrize("call", CALLS)
def test_nothing_waits_for_the_device_and_a_graph_replays_it(call: Callable[..., Any]) -> None:
    case = ragged((5, 0, 300), 20, "cuda")
    x = torch.randn(case.rows, 256, device="cuda", dtype=torch.bfloat16)
    call(x, case.offsets)
    torch.cuda.set_sync_debug_mode("error")
    try:
        call(x, case.offsets)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call(x, case.offsets)
    x.normal_()
    case.offsets.copy_(torch.tensor([100, 228, 301], dtype=torch.int32))
    graph.replay()
    same(found, tuple(t.cpu() for t in call(x, case.offsets)))


def test_a34_rows_past_two_billion_elements_are_right() -> None:
    rows, columns = 2**20 + 40, 2048
    x = torch.zeros(rows, columns, device="cuda", dtype=torch.bfloat16)
    x[-40:].normal_()
    offsets = torch.tensor([rows - 40, rows], dtype=torch.int32, device="cuda")
    want = mx_ragged(x[-40:].cpu(), torch.tensor([40], dtype=torch.int32), False)
    data, scale, padded_data, padded_scale, padded = ops.mx_quantize_ragged_both(x, offsets)
    same((data[-40:], scale[-40:]), want[:2])
    first = int(padded[0])
    same((padded_data[first : first + 128], padded_scale[first // 32 : first // 32 + 4]), (want[2][:128], want[3][:4]))
    last = torch.tensor([40], dtype=torch.int32)
    data, scale = ops.fp8_quantize_rows(x)
    same((data[-40:], scale[-40:]), fp8(x[-40:].cpu(), last)[:2])
    data, scale, _ = ops.fp8_quantize_columns_t(x, offsets)
    same((data[:, first : first + 128], scale[1:]), (fp8(x[-40:].cpu(), last)[2][:, :128], fp8(x[-40:].cpu(), last)[3]))


def test_it_moves_memory_at_three_quarters_of_a_copys_speed() -> None:
    rates = time_quantize(torch.device("cuda"))
    slow = {name: rate for name, rate in rates.items() if rate < 0.75 * rates["copy"]}
    assert not slow, rates
