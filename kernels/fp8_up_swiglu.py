"""The FP8 up projection of the experts with the activation in its epilogue.

    z[r] = (rows[r] · W[e(r)]ᵀ) · row_scale[r] · weight_scale[e(r)] (+ bias)     z [R, 2F] bf16 = [gate | up]
    a[r] = silu(gate) · up                                  a [R, F] bf16; or the clamped SwiGLU (activation.py)

rows [R, D] and W [E, 2F, D] are float8_e4m3fn, gathered already; scales are fp32, row_scale [R] and
weight_scale [E, 2F]. `a` is computed from z as stored; a scale per row of it needs the largest of a whole row, e
one tile does not see, so it leaves in bf16. With `quantise` it leaves in FP8 with a scale per 128 columns, [F/128, R],
for `fp8_block_gemm`; F is then a multiple of 128. Rows past the last offset are written as zeros.

Legend: R rows, E experts, D model width, F expert width.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.ragged_tma import create_ragged_descriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from moegraph.kernels.activation import Activation
from moegraph.kernels.config import FP8, Config, default_config, exact_config
from moegraph.kernels.fp8_block_gemm import BLOCK
from moegraph.kernels.fp8_rows_gemm import EXACT
from moegraph.kernels.launch import (
    Launch,
    load_rows,
    persistent_programs,
    schedule_arguments,
    tile_constants,
    tile_of,
)
from moegraph.kernels.tiles import Schedule, tile_schedule
from moegraph.kernels.tuning import choose_config
from moegraph.kernels.up_epilogue import up_epilogue, up_epilogue_fp8
from moegraph.kernels.zero_tail import zero_tail


@triton.jit
def fp8_up_swiglu_kernel(
    rows_desc,
    weight_desc,
    row_scale_ptr,
    weight_scale_ptr,
    bias_ptr,
    z_desc,
    act_desc,
    act_scale_ptr,
    expert_ptr,
    first_ptr,
    last_ptr,
    count_ptr,
    num_rows,
    F: tl.constexpr,
    D: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    PARTS: tl.constexpr,
    QUANTISE: tl.constexpr,
    BIAS: tl.constexpr,
    CLAMPED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    FLATTEN: tl.constexpr,
    IMPRECISE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """BLOCK_N counts gate and up columns together."""
    HALF: tl.constexpr = BLOCK_N // 2
    num_n: tl.constexpr = (F + HALF - 1) // HALF
    num_m = tl.load(count_ptr)
    for t in tl.range(tl.program_id(0), num_m * num_n, PROGRAMS, flatten=FLATTEN):
        pm, pn = tile_of(t, num_m, num_n, GROUP_M)
        e = tl.load(expert_ptr + pm)
        first = tl.load(first_ptr + pm)
        last = tl.load(last_ptr + pm)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, D, BLOCK_K):
            a = load_rows(rows_desc, first, last, k, BLOCK_M, BLOCK_K)
            b = weight_desc.load([e, 0, pn * HALF, k]).reshape(BLOCK_N, BLOCK_K).T
            acc = tl.dot(a, b, acc, max_num_imprecise_acc=IMPRECISE)
        r = first + tl.arange(0, BLOCK_M)
        c = tl.arange(0, BLOCK_N)
        col = pn * HALF + c % HALF
        at = e * 2 * F + (c // HALF) * F + col
        by_row = tl.load(row_scale_ptr + r, mask=r < last, other=0.0)
        by_column = tl.load(weight_scale_ptr + at, mask=col < F, other=0.0)
        acc = acc * by_row[:, None] * by_column[None, :]
        gate, up = tl.split(acc.reshape(BLOCK_M, 2, HALF).permute(0, 2, 1))
        rows, tensors = (first, last, last, bias_ptr + e * 2 * F), (z_desc, act_desc)
        if QUANTISE:
            scale = up_epilogue_fp8(gate, up, pn * HALF, rows, tensors, BLOCK_M, HALF, F, BIAS, CLAMPED, ALPHA, LIMIT)
            tl.store(act_scale_ptr + pn * num_rows + r, scale, mask=r < last)
        else:
            up_epilogue(gate, up, pn * HALF, rows, tensors, BLOCK_M, HALF, PARTS, F, BIAS, CLAMPED, ALPHA, LIMIT)


def fp8_up_swiglu_launch(
    rows: Tensor,
    row_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    offsets: Tensor,
    z: Tensor,
    act: Tensor,
    act_scale: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    activation: Activation = Activation(),
    exact: bool = False,
    config: Config | None = None,
    schedule: Schedule | None = None,
) -> Launch:
    """The launch that writes `z` [R, 2F] and `act` [R, F], and `act_scale` [F/128, R] if given; `bias` [E, 2F] bf16."""
    num_experts, two_f, d = weight.shape
    f = two_f // 2
    c = config or choose_config("up_swiglu", rows.dtype, f, d, rows.shape[0], num_experts, rows.device).config
    c = exact_config(c) if exact and config is None else c
    if act_scale is not None:
        c = replace(default_config("up_swiglu", FP8, f, d), parts=1) if config is None else c
        if c.block_n != 2 * BLOCK or c.parts != 1:
            raise ValueError(f"fp8_up_swiglu: a tile of {c} does not hold the {BLOCK} columns that share a scale")
    schedule = schedule or tile_schedule(offsets, rows.shape[0], c.block_m)
    half = c.block_n // 2
    programs = persistent_programs(rows.device)
    halves = TensorDescriptor(weight, [num_experts, 2, f, d], [two_f * d, f * d, d, 1], [1, 2, half, c.block_k])
    arguments = {
        "rows_desc": create_ragged_descriptor(rows, [c.block_m, c.block_k]),
        "weight_desc": halves,
        "row_scale_ptr": row_scale,
        "weight_scale_ptr": weight_scale,
        "bias_ptr": bias if bias is not None else z,
        "z_desc": create_ragged_descriptor(z.view(-1, 2, f), [c.block_m, 1, half // c.parts]),
        "act_desc": create_ragged_descriptor(act, [c.block_m, half // c.parts]),
        "act_scale_ptr": act_scale if act_scale is not None else row_scale,
        **schedule_arguments(schedule),
        "num_rows": rows.shape[0],
    }
    constants = {
        "F": f,
        "D": d,
        **tile_constants(c, programs, rows.dtype),
        "PARTS": c.parts,
        "QUANTISE": act_scale is not None,
        "BIAS": bias is not None,
        **activation.constants(),
        "FLATTEN": c.flatten,
        "IMPRECISE": min(EXACT, c.block_k) if exact else None,
    }
    return Launch(fp8_up_swiglu_kernel, (programs,), arguments, constants, c)


def fp8_up_swiglu(
    rows: Tensor,
    row_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    offsets: Tensor,
    *,
    bias: Tensor | None = None,
    activation: Activation = Activation(),
    exact: bool = False,
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:
    """rows [R, D], row_scale [R], weight [E, 2F, D], weight_scale [E, 2F] → (z [R, 2F], a [R, F]) bf16."""
    num_rows, two_f = rows.shape[0], weight.shape[1]
    z = rows.new_empty(num_rows, two_f, dtype=torch.bfloat16)
    act = rows.new_empty(num_rows, two_f // 2, dtype=torch.bfloat16)
    if z.numel():
        tensors = (rows, row_scale, weight, weight_scale, offsets, z, act)
        fp8_up_swiglu_launch(*tensors, bias=bias, activation=activation, exact=exact, config=config).run()
        zero_tail(offsets, z, act)
    return z, act


def fp8_up_swiglu_blocks(
    rows: Tensor,
    row_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    offsets: Tensor,
    *,
    bias: Tensor | None = None,
    activation: Activation = Activation(),
    config: Config | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `fp8_up_swiglu`, with `quantise`: → (z [R, 2F] bf16, a [R, F] FP8, its scale [F/128, R] fp32)."""
    num_rows, two_f = rows.shape[0], weight.shape[1]
    z = rows.new_empty(num_rows, two_f, dtype=torch.bfloat16)
    act, act_scale = rows.new_empty(num_rows, two_f // 2), row_scale.new_ones(two_f // 2 // BLOCK, num_rows)
    if z.numel():
        tensors = (rows, row_scale, weight, weight_scale, offsets, z, act, act_scale)
        fp8_up_swiglu_launch(*tensors, bias=bias, activation=activation, config=config).run()
        zero_tail(offsets, z, act)
    return z, act, act_scale
