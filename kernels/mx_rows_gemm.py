"""Grouped product of MXMX rows and MXMX weights, for Blackwell's tensor cores.

    out[r] = dequantised rows[r] · dequantised W[e(r)]ᵀ      (plus a bias, times a weight per row)

rows [R, K] and W [E, N, K] are float8_e4m3fn with the contraction last; their scales are swizzled uint8 (mx_scales.py).
out [R, N] is bf16, accumulated in fp32. Group sizes are free; rows past the last offset are written as zeros and
neither they nor their scales matter. K is a multiple of 32, N of 16. (OCP Microscaling Formats, version 1.0.)

Legend: R rows, E experts, N and K the sizes of a weight.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.ragged_tma import create_ragged_descriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from moegraph.kernels.config import Config, mx_config
from moegraph.kernels.launch import (
    Launch,
    load_rows,
    persistent_programs,
    schedule_arguments,
    store_rows,
    tile_constants,
    tile_of,
)
from moegraph.kernels.mx_scales import NOWHERE, load_scales, scales_descriptor
from moegraph.kernels.tiles import Schedule, tile_schedule
from moegraph.kernels.zero_tail import zero_tail


@triton.jit
def mx_rows_gemm_kernel(
    rows_desc,
    weight_desc,
    out_desc,
    row_scale_desc,
    weight_scale_desc,
    bias_ptr,
    row_weight_ptr,
    expert_ptr,
    first_ptr,
    last_ptr,
    count_ptr,
    E: tl.constexpr,
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
        which = tl.minimum(e, E - 1)
        live = tl.where(e < E, last, first)  # where the rows end that exist: none of the pseudo-expert E
        block = tl.where(e < E, pm, NOWHERE)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, K, BLOCK_K):
            a = load_rows(rows_desc, first, live, k, BLOCK_M, BLOCK_K)
            b = weight_desc.load([which, pn * BLOCK_N, k]).reshape(BLOCK_N, BLOCK_K).T
            sa = load_scales(row_scale_desc, 0, block, k, BLOCK_M, BLOCK_K)
            sb = load_scales(weight_scale_desc, which, pn * (BLOCK_N // 128), k, BLOCK_N, BLOCK_K)
            acc = tl.dot_scaled(a, sa, "e4m3", b, sb, "e4m3", acc)
        r = first + tl.arange(0, BLOCK_M)
        c = pn * BLOCK_N + tl.arange(0, BLOCK_N)
        if BIAS:
            bias = tl.load(bias_ptr + which * N + c, mask=(c < N) & (e < E), other=0.0)
            acc += bias.to(tl.float32)[None, :]
        if WEIGHTED:
            acc = acc * tl.load(row_weight_ptr + r, mask=r < live, other=0.0)[:, None]
        col = pn * BLOCK_N
        if PARTS == 1:
            store_rows(out_desc, first, last, col, acc.to(out_desc.dtype), BLOCK_M, BLOCK_N)
        else:
            HALF: tl.constexpr = BLOCK_N // 2
            left, right = tl.split(acc.reshape(BLOCK_M, 2, HALF).permute(0, 2, 1))
            store_rows(out_desc, first, last, col, left.to(out_desc.dtype), BLOCK_M, HALF)
            store_rows(out_desc, first, last, col + HALF, right.to(out_desc.dtype), BLOCK_M, HALF)


def mx_grouped_mm_launch(
    rows: Tensor,
    row_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    offsets: Tensor,
    out: Tensor,
    *,
    bias: Tensor | None = None,
    row_weight: Tensor | None = None,
    config: Config | None = None,
    schedule: Schedule | None = None,
) -> Launch:
    """The launch that writes `out` [R, N]; `bias` [E, N] bf16, `row_weight` [R] fp32."""
    num_experts, n, k = weight.shape
    c = config or mx_config("grouped_mm", n, k)
    schedule = schedule or tile_schedule(offsets, rows.shape[0], c.block_m)
    programs = persistent_programs(rows.device)
    arguments = {
        "rows_desc": create_ragged_descriptor(rows, [c.block_m, c.block_k]),
        "weight_desc": TensorDescriptor.from_tensor(weight, [1, c.block_n, c.block_k]),
        "out_desc": create_ragged_descriptor(out, [c.block_m, c.block_n // c.parts]),
        "row_scale_desc": scales_descriptor(row_scale, c.block_m, c.block_k),
        "weight_scale_desc": scales_descriptor(weight_scale, c.block_n, c.block_k),
        "bias_ptr": bias if bias is not None else out,
        "row_weight_ptr": row_weight if row_weight is not None else out,
        **schedule_arguments(schedule),
    }
    constants = {
        "E": num_experts,
        "N": n,
        "K": k,
        **tile_constants(c, programs, rows.dtype),
        "BIAS": bias is not None,
        "WEIGHTED": row_weight is not None,
        "PARTS": c.parts,
        "FLATTEN": c.flatten,
    }
    return Launch(mx_rows_gemm_kernel, (programs,), arguments, constants, c)


def mx_grouped_mm(
    rows: Tensor,
    row_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    offsets: Tensor,
    *,
    bias: Tensor | None = None,
    row_weight: Tensor | None = None,
    config: Config | None = None,
) -> Tensor:
    """rows [R, K], weight [E, N, K] and their swizzled scales → [R, N] bf16.

    `bias` [E, N] bf16 is added, then `row_weight` [R] fp32 scales the rows."""
    out = rows.new_empty(rows.shape[0], weight.shape[1], dtype=torch.bfloat16)
    if out.numel():
        mx_grouped_mm_launch(
            rows,
            row_scale,
            weight,
            weight_scale,
            offsets,
            out,
            bias=bias,
            row_weight=row_weight,
            config=config,
        ).run()
        zero_tail(offsets, out)
    return out
