"""The gradient of the down projection, with that of the activation and of the router weight in its epilogue (B1).

g [R, D] are the rows of the output's gradient, z [R, 2F] = [gate | up] the saved pre-activation, s [R] the router
weight of a row, W2 [E, D, F]. With da = g · W2 and a = silu(gate) · up:

    ds = Σ_f da · a                 the router weight's gradient needs no saved output (SonicMoE, arXiv 2512.14080)
    dz = s · da · a'(z)             [R, 2F]
    a_s = s · a                     [R, F], what the weight gradient of W2 is made with

`a` is computed again from z, so nothing but z is saved. Each column tile writes its part of ds to a column of its own;
the caller adds them: no atomics. Rows past the last offset are written as zeros.

With `separate` in its configuration the same result comes from two kernels, the plain product and `gated_backward`:
da then exists in memory for a moment, e is faster where the epilogue's reads and writes cannot hide behind products
(H200: docs/performance.md).

Legend: R rows, D model width, F expert width, E experts.
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
from moegraph.kernels.config import Config
from moegraph.kernels.gated_backward import gated_backward_launch
from moegraph.kernels.gradient_epilogue import gradient_epilogue
from moegraph.kernels.launch import (
    Launch,
    load_rows,
    persistent_programs,
    schedule_arguments,
    tile_constants,
    tile_of,
)
from moegraph.kernels.rows_gemm import grouped_mm
from moegraph.kernels.tiles import Schedule, tile_schedule
from moegraph.kernels.tuning import choose_config
from moegraph.kernels.zero_tail import zero_tail


@triton.jit
def dgrad_swiglu_kernel(
    grad_desc,
    weight_desc,
    z_desc,
    dz_desc,
    act_desc,
    scale_ptr,
    ds_ptr,
    expert_ptr,
    first_ptr,
    last_ptr,
    count_ptr,
    F: tl.constexpr,
    D: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    PARTS: tl.constexpr,
    CLAMPED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    FLATTEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The epilogue works on PARTS slices of the tile, so that it fits in registers."""
    num_n: tl.constexpr = (F + BLOCK_N - 1) // BLOCK_N
    num_m = tl.load(count_ptr)
    for t in tl.range(tl.program_id(0), num_m * num_n, PROGRAMS, flatten=FLATTEN):
        pm, pn = tile_of(t, num_m, num_n, GROUP_M)
        e = tl.load(expert_ptr + pm)
        first = tl.load(first_ptr + pm)
        last = tl.load(last_ptr + pm)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, D, BLOCK_K):
            g = load_rows(grad_desc, first, last, k, BLOCK_M, BLOCK_K)
            w = weight_desc.load([e, k, pn * BLOCK_N]).reshape(BLOCK_K, BLOCK_N)
            acc = tl.dot(g, w, acc, input_precision=PRECISION)
        r = first + tl.arange(0, BLOCK_M)
        s = tl.load(scale_ptr + r, mask=r < last, other=0.0)[:, None]
        c = pn * BLOCK_N
        rows, tensors = (first, last, last), (z_desc, dz_desc, act_desc)
        ds = gradient_epilogue(acc, s, c, rows, tensors, BLOCK_M, BLOCK_N, PARTS, CLAMPED, ALPHA, LIMIT)
        tl.store(ds_ptr + r.to(tl.int64) * num_n + pn, ds, mask=r < last)


def dgrad_swiglu_launch(
    grad: Tensor,
    weight: Tensor,
    z: Tensor,
    row_weight: Tensor,
    offsets: Tensor,
    dz: Tensor,
    act: Tensor,
    ds_parts: Tensor,
    *,
    activation: Activation = Activation(),
    config: Config,
    schedule: Schedule | None = None,
) -> Launch:
    """The launch that writes `dz` [R, 2F], `act` [R, F] and `ds_parts` [R, column tiles] fp32."""
    _, d, f = weight.shape
    c = config
    schedule = schedule or tile_schedule(offsets, grad.shape[0], c.block_m)
    cols = c.block_n // c.parts
    programs = persistent_programs(grad.device)
    arguments = {
        "grad_desc": create_ragged_descriptor(grad, [c.block_m, c.block_k]),
        "weight_desc": TensorDescriptor.from_tensor(weight, [1, c.block_k, c.block_n]),
        "z_desc": create_ragged_descriptor(z.view(-1, 2, f), [c.block_m, 1, cols]),
        "dz_desc": create_ragged_descriptor(dz.view(-1, 2, f), [c.block_m, 1, cols]),
        "act_desc": create_ragged_descriptor(act, [c.block_m, cols]),
        "scale_ptr": row_weight,
        "ds_ptr": ds_parts,
        **schedule_arguments(schedule),
    }
    constants = {
        "F": f,
        "D": d,
        **tile_constants(c, programs, grad.dtype),
        "PARTS": c.parts,
        **activation.constants(),
        "FLATTEN": c.flatten,
    }
    return Launch(dgrad_swiglu_kernel, (programs,), arguments, constants, c)


def dgrad_swiglu(
    grad: Tensor,
    weight: Tensor,
    z: Tensor,
    row_weight: Tensor,
    offsets: Tensor,
    *,
    activation: Activation = Activation(),
    config: Config | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """grad [R, D], weight [E, D, F], z [R, 2F], row_weight [R] fp32 → (dz [R, 2F], a_s [R, F], ds [R] fp32)."""
    rows, (num_experts, d, f) = grad.shape[0], weight.shape
    if config is None and activation.clamped:  # its slopes do not fit in the registers of the fused epilogue
        plain = choose_config("grouped_mm_dgrad", grad.dtype, f, d, rows, num_experts, grad.device).config
        config = replace(plain, separate=True)
    c = config or choose_config("dgrad_swiglu", grad.dtype, f, d, rows, num_experts, grad.device).config
    dz, act = grad.new_empty(rows, 2 * f), grad.new_empty(rows, f)
    if c.separate:
        ds = grad.new_empty(rows, dtype=torch.float32)
        da = grouped_mm(grad, weight, offsets, transposed=True, config=replace(c, separate=False))
        if dz.numel():
            gated_backward_launch(da, z, row_weight, offsets, dz, act, ds, activation=activation).run()
        return dz, act, ds
    parts = grad.new_empty(rows, triton.cdiv(f, c.block_n), dtype=torch.float32)
    if dz.numel():
        dgrad_swiglu_launch(grad, weight, z, row_weight, offsets, dz, act, parts, activation=activation, config=c).run()
        zero_tail(offsets, dz, act, parts)
    return dz, act, parts[:, 0] if parts.shape[1] == 1 else parts.sum(1)
