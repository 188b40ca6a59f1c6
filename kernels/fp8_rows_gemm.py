"""Grouped product of FP8 rows and FP8 weights with a scale per row of each, in fp32.

    out[r] = (rows[r] · W[e(r)]ᵀ) · row_scale[r] · weight_scale[e(r)]      (plus a bias, times a weight per row)

rows [R, K] and W [E, N, K] are float8_e4m3fn with the contraction last in both, as FP8 matrix units want it; so the
input gradient is this product with a weight quantised along its other side, [E, K, N] read as [E, N, K]. Scales are
fp32: row_scale [R], weight_scale [E, N]. out [R, N] is bf16. Group sizes are free; rows past the last offset are
written as zeros and neither they nor their scales matter. K and N are multiples of 16.

Hopper's FP8 units keep about 14 bits of an accumulator. `exact` adds every 128 products to an fp32 one, e takes
twice the registers, so tiles are half as wide (DeepSeek-V3, arXiv 2412.19437, section 3.3.2).

Legend: R rows, E experts, N and K the sizes of a weight.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.ragged_tma import create_ragged_descriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from moegraph.kernels.config import Config, exact_config
from moegraph.kernels.launch import (
    Launch,
    load_rows,
    persistent_programs,
    schedule_arguments,
    store_rows,
    tile_constants,
    tile_of,
)
from moegraph.kernels.tiles import Schedule, tile_schedule
from moegraph.kernels.tuning import choose_config
from moegraph.kernels.zero_tail import zero_tail

EXACT = 128  # products that Hopper's units add up before they go to fp32


@triton.jit
def fp8_rows_gemm_kernel(
    rows_desc,
    weight_desc,
    out_desc,
    row_scale_ptr,
    weight_scale_ptr,
    bias_ptr,
    row_weight_ptr,
    expert_ptr,
    first_ptr,
    last_ptr,
    count_ptr,
    N: tl.constexpr,
    K: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    BIAS: tl.constexpr,
    WEIGHTED: tl.constexpr,
    PARTS: tl.constexpr,
    FLATTEN: tl.constexpr,
    IMPRECISE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """N columns of the output, contraction over K. A tile is stored in PARTS (1 or 2) column slices."""
    num_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    num_m = tl.load(count_ptr)
    for t in tl.range(tl.program_id(0), num_m * num_n, PROGRAMS, flatten=FLATTEN):
        pm, pn = tile_of(t, num_m, num_n, GROUP_M)
        e = tl.load(expert_ptr + pm)
        first = tl.load(first_ptr + pm)
        last = tl.load(last_ptr + pm)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, K, BLOCK_K):
            a = load_rows(rows_desc, first, last, k, BLOCK_M, BLOCK_K)
            b = weight_desc.load([e, pn * BLOCK_N, k]).reshape(BLOCK_N, BLOCK_K).T
            acc = tl.dot(a, b, acc, max_num_imprecise_acc=IMPRECISE)
        r = first + tl.arange(0, BLOCK_M)
        c = pn * BLOCK_N + tl.arange(0, BLOCK_N)
        by_row = tl.load(row_scale_ptr + r, mask=r < last, other=0.0)
        by_column = tl.load(weight_scale_ptr + e * N + c, mask=c < N, other=0.0)
        if WEIGHTED:
            weight = tl.load(row_weight_ptr + r, mask=r < last, other=0.0)
            if not BIAS:
                by_row = by_row * weight
        acc = acc * by_row[:, None] * by_column[None, :]
        if BIAS:
            bias = tl.load(bias_ptr + e * N + c, mask=c < N, other=0.0)
            acc += bias.to(tl.float32)[None, :]
            if WEIGHTED:
                acc = acc * weight[:, None]
        col = pn * BLOCK_N
        if PARTS == 1:
            store_rows(out_desc, first, last, col, acc.to(out_desc.dtype), BLOCK_M, BLOCK_N)
        else:
            HALF: tl.constexpr = BLOCK_N // 2
            left, right = tl.split(acc.reshape(BLOCK_M, 2, HALF).permute(0, 2, 1))
            store_rows(out_desc, first, last, col, left.to(out_desc.dtype), BLOCK_M, HALF)
            store_rows(out_desc, first, last, col + HALF, right.to(out_desc.dtype), BLOCK_M, HALF)


def fp8_grouped_mm_launch(
    rows: Tensor,
    row_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    offsets: Tensor,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    row_weight: Tensor | None = None,
    exact: bool = False,
    config: Config | None = None,
    schedule: Schedule | None = None,
) -> Launch:
    """The launch that writes `out` [R, N]; `bias` [E, N] bf16, `row_weight` [R] fp32."""
    num_experts, n, k = weight.shape
    c = config or choose_config("grouped_mm", rows.dtype, n, k, rows.shape[0], num_experts, rows.device).config
    c = exact_config(c) if exact and config is None else c
    schedule = schedule or tile_schedule(offsets, rows.shape[0], c.block_m)
    programs = persistent_programs(rows.device)
    arguments = {
        "rows_desc": create_ragged_descriptor(rows, [c.block_m, c.block_k]),
        "weight_desc": TensorDescriptor.from_tensor(weight, [1, c.block_n, c.block_k]),
        "out_desc": create_ragged_descriptor(out, [c.block_m, c.block_n // c.parts]),
        "row_scale_ptr": row_scale,
        "weight_scale_ptr": weight_scale,
        "bias_ptr": bias if bias is not None else out,
        "row_weight_ptr": row_weight if row_weight is not None else row_scale,
        **schedule_arguments(schedule),
    }
    constants = {
        "N": n,
        "K": k,
        **tile_constants(c, programs, rows.dtype),
        "BIAS": bias is not None,
        "WEIGHTED": row_weight is not None,
        "PARTS": c.parts,
        "FLATTEN": c.flatten,
        "IMPRECISE": min(EXACT, c.block_k) if exact else None,
    }
    return Launch(fp8_rows_gemm_kernel, (programs,), arguments, constants, c)


def fp8_grouped_mm(
    rows: Tensor,
    row_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    offsets: Tensor,
    *,
    bias: Tensor | None = None,
    row_weight: Tensor | None = None,
    exact: bool = False,
    config: Config | None = None,
) -> Tensor:
    """rows [R, K], row_scale [R], weight [E, N, K], weight_scale [E, N] → [R, N] bf16.

    `bias` [E, N] bf16 is added, then `row_weight` [R] fp32 scales the rows."""
    out = rows.new_empty(rows.shape[0], weight.shape[1], dtype=torch.bfloat16)
    if out.numel():
        fp8_grouped_mm_launch(
            rows,
            row_scale,
            weight,
            weight_scale,
            offsets,
            out,
            bias=bias,
            row_weight=row_weight,
            exact=exact,
            config=config,
        ).run()
        zero_tail(offsets, out)
    return out
