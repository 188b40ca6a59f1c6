"""FP8 and MXFP8 products on a GPU, through the operators: against float64 products of the same quantised values, block
of rows by block of rows, at every awkward group size; reproducible; without a host synchronisation."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from moegraph import ops
from moegraph.ops import block_mm, mx_mm, mx_quantized_mm, scaled_mm
from moegraph.ops.expert_ffn import activation_slopes, gated_gradient
from moegraph.ops.mx_scales import swizzle_row_scales, swizzle_scales
from tests.kernels.cases import Ragged, ragged, relative_error
from tests.kernels.scaled_cases import (
    block_restored,
    grouped64,
    mx_quantised,
    mx_restored,
    poisoned,
    quantised,
    restored,
    square_quantised,
    transposed_runs,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

SIZES = [(0, 1, 127, 128, 129, 300), (0, 0, 900, 0), (64,) * 8]
WIDTHS = [(256, 512), (288, 160), (2048, 1024)]
BOUND = {True: 6e-3, False: 1.5e-2}  # of `exact` or not: Hopper's own accumulation is coarse


def worst_tile(have: Tensor, want: Tensor) -> float:
    """The largest relative error over blocks of 64 rows, against the mean size of a block: a wrong tile cannot hide."""
    have, want = have.double().flatten(0, -2), want.double().flatten(0, -2)
    scale = want.norm() / max(want.shape[0] / 64, 1) ** 0.5
    blocks = zip(have.split(64), want.split(64), strict=True)
    return max(float((a - b).norm() / scale) for a, b in blocks)


def close(have: Tensor, want: Tensor, bound: float) -> None:
    assert relative_error(have, want) < bound
    if have.dim() > 1:
        assert worst_tile(have, want) < 4 * bound


def made(case: Ragged, k: int, n: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    rows = torch.randn(case.rows, k, device="cuda") * torch.exp(torch.randn(case.rows, 1, device="cuda"))
    return rows, torch.randn(len(case.sizes), n, k, device="cuda") * torch.exp(torch.randn(n, 1, device="cuda"))


def fp8_operands(case: Ragged, k: int, n: int) -> tuple[tuple[Tensor, ...], Tensor]:
    rows, weight = (quantised(x) for x in made(case, k, n))
    real = case.rows - case.tail
    arguments = (poisoned(rows[0], real), poisoned(rows[1], real), *weight, case.offsets)
    return arguments, grouped64(restored(*rows), restored(*weight), case)


def mx_operands(case: Ragged, k: int, n: int, swizzled: bool) -> tuple[tuple[Tensor, ...], Tensor]:
    rows, weight = (mx_quantised(x) for x in made(case, k, n))
    want, real = grouped64(mx_restored(*rows), mx_restored(*weight), case), case.rows - case.tail
    scales = (poisoned(rows[1], real), weight[1])
    if swizzled:
        scales = (swizzle_row_scales(scales[0], case.offsets), swizzle_scales(scales[1]))
    return (poisoned(rows[0], real), scales[0], weight[0], scales[1], case.offsets), want


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("d", "f"), WIDTHS)
@pytest.mark.parametrize("kind", ["fp8", "fp8 exact", "mx", "mx swizzled"])
def test_products_and_the_experts_halves_equal_float64(sizes: tuple[int, ...], d: int, f: int, kind: str) -> None:
    case = ragged(sizes, 37, "cuda")
    real, exact = case.rows - case.tail, kind == "fp8 exact"
    bound = BOUND[kind != "fp8"]

    def operands(k: int, n: int) -> tuple[tuple[Tensor, ...], Tensor]:
        return fp8_operands(case, k, n) if "fp8" in kind else mx_operands(case, k, n, "swizzled" in kind)

    options = {"exact": exact} if "fp8" in kind else {"swizzled": "swizzled" in kind}
    module = scaled_mm if "fp8" in kind else mx_mm
    prefix = "fp8" if "fp8" in kind else "mx"
    row_weight = torch.rand(case.rows, device="cuda")
    p, want = operands(f, d)
    have = getattr(module, f"{prefix}_grouped_mm")(*p, None, poisoned(row_weight, real), **options)
    close(have, want * row_weight.double()[:, None], bound)
    assert not have[real:].any()
    p, want = operands(d, 2 * f)
    z, act = getattr(module, f"{prefix}_up_swiglu")(*p, None, 0.0, 0.0, **options)
    close(z, want, bound)
    close(act, activation_slopes(z.double(), 0.0, 0.0)[0], 6e-3)
    p, want = operands(d, f)
    z, tensors = torch.randn_like(z), (*p[:4],)
    rest = (poisoned(z, real), poisoned(row_weight, real), case.offsets, 0.0, 0.0)
    found = getattr(module, f"{prefix}_dgrad_swiglu")(*tensors, *rest, **options)
    expected = gated_gradient(want, z.double(), row_weight.double(), case.offsets, 0.0, 0.0)
    for mine, true in zip(found, expected, strict=True):
        close(mine, true, 1.5 * bound)
        assert not mine[real:].any()


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("d", "f"), WIDTHS)
@pytest.mark.parametrize("limit", [0.0, 0.8])
def test_results_in_mxfp8_are_those_of_quantising_the_others(
    sizes: tuple[int, ...], d: int, f: int, limit: float
) -> None:
    """But for what the product itself adds up in another order: the gradient of the router weight."""
    case = ragged(sizes, 37, "cuda")
    p, _ = mx_operands(case, d, 2 * f, True)
    z, act = mx_mm.mx_up_swiglu(*p, None, 1.7, limit, True)
    have = mx_quantized_mm.mx_up_swiglu_quantized(*p, None, 1.7, limit)
    for a, b in zip(have, (z, *ops.mx_quantize_rows(act, case.offsets, swizzled=True)), strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    p, _ = mx_operands(case, d, f, True)
    tensors = (*p[:4], z, torch.rand(case.rows, device="cuda"), case.offsets, 1.7, limit)
    dz, act, ds, *quantised_dz = mx_quantized_mm.mx_dgrad_swiglu_quantized(*tensors)
    plain = mx_mm.mx_dgrad_swiglu(*tensors, True)
    close(ds, plain[2], 1e-6)
    want = (*plain[:2], *ops.mx_quantize_rows(plain[0], case.offsets, swizzled=True))
    for a, b in zip((dz, act, *quantised_dz), want, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("d", "f"), WIDTHS)
@pytest.mark.parametrize("limit", [0.0, 0.8])
def test_a_saved_pre_activation_is_quantised_and_restored(sizes: tuple[int, ...], d: int, f: int, limit: float) -> None:
    case = ragged(sizes, 37, "cuda")
    p, _ = mx_operands(case, d, 2 * f, True)
    z, *act = mx_quantized_mm.mx_up_swiglu_quantized(*p, None, 1.7, limit)
    saved = ops.mx_quantize_rows(z, case.offsets)
    have = mx_quantized_mm.mx_up_swiglu_saved(*p, None, 1.7, limit)
    for a, b in zip(have, (*saved, *act), strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    p, _ = mx_operands(case, d, f, True)
    rest = (torch.rand(case.rows, device="cuda"), case.offsets, 1.7, limit)
    want = mx_quantized_mm.mx_dgrad_swiglu_quantized(*p[:4], ops.mx_dequantize_rows(*saved), *rest)
    dz, act_, ds, *quantised_dz = mx_quantized_mm.mx_dgrad_swiglu_saved(*p[:4], *saved, *rest)
    close(ds, want[2], 1e-6)
    for a, b in zip((dz, act_, *quantised_dz), (*want[:2], *want[3:]), strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("k", "n"), WIDTHS)
@pytest.mark.parametrize("exact", [False, True])
def test_the_fp8_weight_gradient_equals_float64(sizes: tuple[int, ...], k: int, n: int, exact: bool) -> None:
    torch.manual_seed(0)
    case = ragged(sizes, 0, "cuda")
    grad, rows = (torch.randn(case.rows, width, device="cuda") for width in (n, k))
    grad_t, grad_scale, ends = transposed_runs(grad, case, scaled_mm.WGRAD_ALIGN)
    rows_t, rows_scale, _ = transposed_runs(rows, case, scaled_mm.WGRAD_ALIGN)
    have, start = scaled_mm.fp8_grouped_mm_wgrad(grad_t, grad_scale, rows_t, rows_scale, ends, exact), 0
    for e, size in enumerate(sizes):
        if size:
            left, right = (quantised(x[start : start + size].t()) for x in (grad, rows))
            close(have[e], restored(*left) @ restored(*right).t(), BOUND[exact])
        else:
            assert not have[e].any()
        start += size


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("d", "f"), [(256, 512), (2048, 1024)])
def test_an_activation_quantised_in_blocks_goes_through_the_down_projection(
    sizes: tuple[int, ...], d: int, f: int
) -> None:
    case = ragged(sizes, 37, "cuda")
    p, _ = fp8_operands(case, d, 2 * f)
    z, act, scale = block_mm.fp8_up_swiglu_blocks(*p)
    assert torch.equal(z, scaled_mm.fp8_up_swiglu(*p)[0])
    blocks = activation_slopes(z.double(), 0.0, 0.0)[0].unflatten(1, (-1, 128))
    largest, a = blocks.abs().amax(-1, keepdim=True), block_restored(act, scale)
    # Half of the last of four bits, or half of the smallest FP8 value; 448 is the largest.
    off = (blocks - a.unflatten(1, (-1, 128))).abs()
    assert (off <= blocks.abs() / 15.5 + largest / 448 / 1000 + 1e-12).all()
    weight, weight_scale, values = square_quantised(torch.randn(len(sizes), d, f, device="cuda"))
    row_weight = torch.rand(case.rows, device="cuda")
    have = block_mm.fp8_block_grouped_mm(act, scale, weight, weight_scale, case.offsets, None, row_weight)
    close(have, grouped64(a, values, case) * row_weight.double()[:, None], BOUND[True])
    assert not have[case.rows - case.tail :].any()


def test_exact_accumulation_is_closer_over_a_long_contraction() -> None:
    p, want = fp8_operands(ragged((256, 300), 0, "cuda"), 16384, 256)
    fast, exact = (relative_error(scaled_mm.fp8_grouped_mm(*p, exact=value), want) for value in (False, True))
    assert exact < 3e-3
    assert exact <= fast


@pytest.mark.parametrize("kind", ["fp8", "mx"])
def test_two_runs_are_bitwise_equal_and_nothing_waits_for_the_device(kind: str) -> None:
    case = ragged((0, 1, 127, 700, 129), 37, "cuda")
    p, _ = fp8_operands(case, 512, 256) if kind == "fp8" else mx_operands(case, 512, 256, True)
    operator = scaled_mm.fp8_up_swiglu if kind == "fp8" else partial(mx_mm.mx_up_swiglu, swizzled=True)
    first = operator(*p)
    torch.cuda.set_sync_debug_mode("error")
    try:
        second = operator(*p)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_the_last_expert_of_a_stack_past_two_billion_elements_is_right() -> None:
    experts, d, f = 64, 4096, 8704  # E · N · K = 2.28e9 > 2³¹
    weight = torch.zeros(experts, f, d, device="cuda", dtype=torch.uint8).view(torch.float8_e4m3fn)
    scale = torch.ones(experts, f, device="cuda")
    last, scale[-1] = quantised(torch.randn(f, d, device="cuda"))
    weight[-1].copy_(last)
    rows = quantised(torch.randn(130, d, device="cuda"))
    offsets = torch.zeros(experts, dtype=torch.int32, device="cuda")
    offsets[-1] = 130
    have = scaled_mm.fp8_grouped_mm(*rows, weight, scale, offsets)
    assert relative_error(have, restored(*rows) @ restored(last, scale[-1]).t()) < BOUND[False]
