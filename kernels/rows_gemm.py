"""Grouped product over ragged rows, persistent over a device-side schedule.

    forward          W [E, N, K]   out [R, N] = rows [R, K] · W[e(r)]ᵀ     (plus a bias, times a weight per row)
    input gradient   W [E, N, K]   out [R, K] = rows [R, N] · W[e(r)]      (`transposed`)

bf16 with fp32 accumulation, fp32 in full precision. Group sizes are free, zero included; rows past the last offset are
written as zeros and what they hold does not matter. Rows must have strides of a multiple of 16 bytes.

Legend: R rows, E experts, N and K the sizes of a weight.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.ragged_tma import create_ragged_descriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from moegraph.kernels.config import Config
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


@triton.jit
def rows_gemm_kernel(
    rows_desc,
    weight_desc,
    out_desc,
    bias_ptr,
    scale_ptr,
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
    TRANSPOSED: tl.constexpr,
    BIAS: tl.constexpr,
    SCALE: tl.constexpr,
    PARTS: tl.constexpr,
    FLATTEN: tl.constexpr,
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
            if TRANSPOSED:
                b = weight_desc.load([e, k, pn * BLOCK_N]).reshape(BLOCK_K, BLOCK_N)
            else:
                b = weight_desc.load([e, pn * BLOCK_N, k]).reshape(BLOCK_N, BLOCK_K).T
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
        if BIAS:
            c = pn * BLOCK_N + tl.arange(0, BLOCK_N)
            bias = tl.load(bias_ptr + e * N + c, mask=c < N, other=0.0)
            acc += bias.to(tl.float32)[None, :]
        if SCALE:
            r = first + tl.arange(0, BLOCK_M)
            acc = acc * tl.load(scale_ptr + r, mask=r < last, other=0.0)[:, None]
        col = pn * BLOCK_N
        if PARTS == 1:
            store_rows(out_desc, first, last, col, acc.to(out_desc.dtype), BLOCK_M, BLOCK_N)
        else:
            HALF: tl.constexpr = BLOCK_N // 2
            left, right = tl.split(acc.reshape(BLOCK_M, 2, HALF).permute(0, 2, 1))
            store_rows(out_desc, first, last, col, left.to(out_desc.dtype), BLOCK_M, HALF)
            store_rows(out_desc, first, last, col + HALF, right.to(out_desc.dtype), BLOCK_M, HALF)


def grouped_mm_launch(
    rows: Tensor,
    weight: Tensor,
    offsets: Tensor,
    out: Tensor,
    *,
    transposed: bool = False,
    bias: Tensor | None = None,
    row_weight: Tensor | None = None,
    config: Config | None = None,
    schedule: Schedule | None = None,
) -> Launch:
    """The launch that writes `out` [R, N] ([R, K] if `transposed`); `bias` [E, N], `row_weight` [R] fp32."""
    num_experts, weight_n, weight_k = weight.shape
    n, k = (weight_k, weight_n) if transposed else (weight_n, weight_k)
    kernel = "grouped_mm_dgrad" if transposed else "grouped_mm"
    c = config or choose_config(kernel, rows.dtype, n, k, rows.shape[0], num_experts, rows.device).config
    schedule = schedule or tile_schedule(offsets, rows.shape[0], c.block_m)
    weight_block = [1, c.block_k, c.block_n] if transposed else [1, c.block_n, c.block_k]
    programs = persistent_programs(rows.device)
    arguments = {
        "rows_desc": create_ragged_descriptor(rows, [c.block_m, c.block_k]),
        "weight_desc": TensorDescriptor.from_tensor(weight, weight_block),
        "out_desc": create_ragged_descriptor(out, [c.block_m, c.block_n // c.parts]),
        "bias_ptr": bias if bias is not None else weight,
        "scale_ptr": row_weight if row_weight is not None else out,
        **schedule_arguments(schedule),
    }
    constants = {
        "N": n,
        "K": k,
        **tile_constants(c, programs, rows.dtype),
        "TRANSPOSED": transposed,
        "BIAS": bias is not None,
        "SCALE": row_weight is not None,
        "PARTS": c.parts,
        "FLATTEN": c.flatten,
    }
    return Launch(rows_gemm_kernel, (programs,), arguments, constants, c)


def grouped_mm(
    rows: Tensor,
    weight: Tensor,
    offsets: Tensor,
    *,
    transposed: bool = False,
    bias: Tensor | None = None,
    row_weight: Tensor | None = None,
    config: Config | None = None,
    schedule: Schedule | None = None,
) -> Tensor:
    """rows [R, K] · weight [E, N, K] → [R, N]; `transposed`: rows [R, N] → [R, K].

    `bias` [E, N] of the rows' dtype is added, then `row_weight` [R] fp32 scales the rows."""
    out = rows.new_empty(rows.shape[0], weight.shape[2] if transposed else weight.shape[1])
    if out.numel():
        grouped_mm_launch(
            rows,
            weight,
            offsets,
            out,
            transposed=transposed,
            bias=bias,
            row_weight=row_weight,
            config=config,
            schedule=schedule,
        ).run()
        zero_tail(offsets, out)
    return out
