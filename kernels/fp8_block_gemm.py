"""Grouped product of FP8 operands scaled in blocks: rows in 1 × 128, weights in 128 × 128.

    out[r] = Σ_c (rows[r, c] · W[e(r)][:, c]ᵀ) · row_scale[c, r] · weight_scale[e(r)][:, c]   (times a weight per row)

c are blocks of 128 of the contraction; each one's product is added to an fp32 accumulator, scaled (DeepSeek-V3, arXiv
2412.19437, section 3.3.1). A block's scale needs 128 columns and not a whole row, so that the kernel e makes `rows`
can quantise them in its epilogue (`fp8_up_swiglu` with `quantise`). rows [R, K] and W [E, N, K] are float8_e4m3fn, K a
multiple of 128, N of 16; row_scale [K/128, R] and weight_scale [E, ⌈N/128⌉, K/128] are fp32. out [R, N] is bf16. Rows
past the last offset are written as zeros and neither they nor their scales matter.

Legend: R rows, E experts, N and K the sizes of a weight.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.ragged_tma import create_ragged_descriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from moegraph.kernels.config import Config, block_config
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
from moegraph.kernels.zero_tail import zero_tail

BLOCK = 128  # of the contraction, and of a weight's rows: what shares a scale


@triton.jit
def fp8_block_gemm_kernel(
    rows_desc,
    weight_desc,
    out_desc,
    row_scale_ptr,
    weight_scale_ptr,
    row_weight_ptr,
    expert_ptr,
    first_ptr,
    last_ptr,
    count_ptr,
    num_rows,
    N: tl.constexpr,
    K: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    WEIGHTED: tl.constexpr,
    FLATTEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """N columns of the output, contraction over K, BLOCK_K = 128 of it per step; BLOCK_N divides 128."""
    num_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    scales_n: tl.constexpr = (N + 127) // 128
    num_m = tl.load(count_ptr)
    for t in tl.range(tl.program_id(0), num_m * num_n, PROGRAMS, flatten=FLATTEN):
        pm, pn = tile_of(t, num_m, num_n, GROUP_M)
        e = tl.load(expert_ptr + pm)
        first = tl.load(first_ptr + pm)
        last = tl.load(last_ptr + pm)
        r = first + tl.arange(0, BLOCK_M)
        by_row = row_scale_ptr + r
        by_block = weight_scale_ptr + (e * scales_n + pn * BLOCK_N // 128) * (K // BLOCK_K)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        scale = tl.load(by_row, mask=r < last, other=0.0)  # loaded a step ahead: only operands are pipelined
        factor = tl.load(by_block)
        for c in range(0, K // BLOCK_K):
            a = load_rows(rows_desc, first, last, c * BLOCK_K, BLOCK_M, BLOCK_K)
            b = weight_desc.load([e, pn * BLOCK_N, c * BLOCK_K]).reshape(BLOCK_N, BLOCK_K).T
            after = tl.minimum(c + 1, K // BLOCK_K - 1)
            next_scale = tl.load(by_row + after * num_rows, mask=r < last, other=0.0)
            next_factor = tl.load(by_block + after)
            acc += tl.dot(a, b) * (scale * factor)[:, None]
            scale, factor = next_scale, next_factor
        if WEIGHTED:
            acc = acc * tl.load(row_weight_ptr + r, mask=r < last, other=0.0)[:, None]
        store_rows(out_desc, first, last, pn * BLOCK_N, acc.to(out_desc.dtype), BLOCK_M, BLOCK_N)


def fp8_block_grouped_mm_launch(
    rows: Tensor,
    row_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    offsets: Tensor,
    out: Tensor,
    *,
    row_weight: Tensor | None = None,
    config: Config | None = None,
    schedule: Schedule | None = None,
) -> Launch:
    """The launch that writes `out` [R, N]; `row_weight` [R] fp32."""
    _, n, k = weight.shape
    c = config or block_config(n)
    if c.block_k != BLOCK or BLOCK % c.block_n:
        raise ValueError(f"fp8_block_grouped_mm: a tile of {c} has more than one scale of a weight per step")
    schedule = schedule or tile_schedule(offsets, rows.shape[0], c.block_m)
    programs = persistent_programs(rows.device)
    arguments = {
        "rows_desc": create_ragged_descriptor(rows, [c.block_m, c.block_k]),
        "weight_desc": TensorDescriptor.from_tensor(weight, [1, c.block_n, c.block_k]),
        "out_desc": create_ragged_descriptor(out, [c.block_m, c.block_n]),
        "row_scale_ptr": row_scale,
        "weight_scale_ptr": weight_scale,
        "row_weight_ptr": row_weight if row_weight is not None else row_scale,
        **schedule_arguments(schedule),
        "num_rows": rows.shape[0],
    }
    constants = {
        "N": n,
        "K": k,
        **tile_constants(c, programs, rows.dtype),
        "WEIGHTED": row_weight is not None,
        "FLATTEN": c.flatten,
    }
    return Launch(fp8_block_gemm_kernel, (programs,), arguments, constants, c)


def fp8_block_grouped_mm(
    rows: Tensor,
    row_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    offsets: Tensor,
    *,
    row_weight: Tensor | None = None,
    config: Config | None = None,
) -> Tensor:
    """rows [R, K], row_scale [K/128, R], weight [E, N, K], weight_scale [E, ⌈N/128⌉, K/128] → [R, N] bf16.

    `row_weight` [R] fp32 scales the rows."""
    out = rows.new_empty(rows.shape[0], weight.shape[1], dtype=torch.bfloat16)
    if out.numel():
        fp8_block_grouped_mm_launch(
            rows,
            row_scale,
            weight,
            weight_scale,
            offsets,
            out,
            row_weight=row_weight,
            config=config,
        ).run()
        zero_tail(offsets, out)
    return out
