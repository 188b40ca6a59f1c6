"""The MXMX up projection of the experts with the activation in its epilogue, for Blackwell's tensor cores.

    z[r] = dequantised rows[r] · dequantised W[e(r)]ᵀ (+ bias)      z [R, 2F] bf16 = [gate | up]
    a[r] = silu(gate) · up                                          a [R, F] bf16; or the clamped SwiGLU (activation.py)

rows [R, D] and W [E, 2F, D] are float8_e4m3fn, gathered already, their scales swizzled (mx_scales.py). F is a multiple
of 128, so that the scales of the gate and of the up rows are whole blocks; D is one of 32. Each half has an accumulator
of its own. `a` is computed from z as stored. Rows past the last offset are written as zeros.

Legend: R rows, E experts, D model width, F expert width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.ragged_tma import create_ragged_descriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from moegraph.kernels.activation import Activation
from moegraph.kernels.config import Config, mx_config
from moegraph.kernels.launch import (
    Launch,
    load_rows,
    persistent_programs,
    schedule_arguments,
    tile_constants,
    tile_of,
)
from moegraph.kernels.mx_scales import NOWHERE, load_scales, scales_descriptor
from moegraph.kernels.tiles import Schedule, tile_schedule
from moegraph.kernels.up_epilogue import up_epilogue
from moegraph.kernels.zero_tail import zero_tail


@triton.jit
def mx_up_swiglu_kernel(
    rows_desc,
    weight_desc,
    row_scale_desc,
    weight_scale_desc,
    bias_ptr,
    z_desc,
    act_desc,
    expert_ptr,
    first_ptr,
    last_ptr,
    count_ptr,
    E: tl.constexpr,
    F: tl.constexpr,
    D: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    PARTS: tl.constexpr,
    BIAS: tl.constexpr,
    CLAMPED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    FLATTEN: tl.constexpr,
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
        which = tl.minimum(e, E - 1)
        live = tl.where(e < E, last, first)  # where the rows end that exist: none of the pseudo-expert E
        block = tl.where(e < E, pm, NOWHERE)
        gate = tl.zeros((BLOCK_M, HALF), tl.float32)
        up = tl.zeros((BLOCK_M, HALF), tl.float32)
        for k in range(0, D, BLOCK_K):
            a = load_rows(rows_desc, first, live, k, BLOCK_M, BLOCK_K)
            sa = load_scales(row_scale_desc, 0, block, k, BLOCK_M, BLOCK_K)
            b = weight_desc.load([2 * which, pn * HALF, k]).reshape(HALF, BLOCK_K).T
            sb = load_scales(weight_scale_desc, 2 * which, pn * (HALF // 128), k, HALF, BLOCK_K)
            gate = tl.dot_scaled(a, sa, "e4m3", b, sb, "e4m3", gate)
            b = weight_desc.load([2 * which + 1, pn * HALF, k]).reshape(HALF, BLOCK_K).T
            sb = load_scales(weight_scale_desc, 2 * which + 1, pn * (HALF // 128), k, HALF, BLOCK_K)
            up = tl.dot_scaled(a, sa, "e4m3", b, sb, "e4m3", up)
        rows, tensors = (first, last, live, bias_ptr + which * 2 * F), (z_desc, act_desc)
        up_epilogue(gate, up, pn * HALF, rows, tensors, BLOCK_M, HALF, PARTS, F, BIAS, CLAMPED, ALPHA, LIMIT)


def mx_up_swiglu_launch(
    rows: Tensor,
    row_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    offsets: Tensor,
    z: Tensor,
    act: Tensor,
    *,
    bias: Tensor | None = None,
    activation: Activation = Activation(),
    config: Config | None = None,
    schedule: Schedule | None = None,
) -> Launch:
    """The launch that writes `z` [R, 2F] and `act` [R, F]; `bias` [E, 2F] bf16."""
    num_experts, two_f, d = weight.shape
    f = two_f // 2
    c = config or mx_config("up_swiglu", f, d)
    schedule = schedule or tile_schedule(offsets, rows.shape[0], c.block_m)
    half = c.block_n // 2
    programs = persistent_programs(rows.device)
    halves = weight_scale.view(2 * num_experts, f, -1)
    arguments = {
        "rows_desc": create_ragged_descriptor(rows, [c.block_m, c.block_k]),
        "weight_desc": TensorDescriptor.from_tensor(weight.view(2 * num_experts, f, d), [1, half, c.block_k]),
        "row_scale_desc": scales_descriptor(row_scale, c.block_m, c.block_k),
        "weight_scale_desc": scales_descriptor(halves, half, c.block_k),
        "bias_ptr": bias if bias is not None else z,
        "z_desc": create_ragged_descriptor(z.view(-1, 2, f), [c.block_m, 1, half // c.parts]),
        "act_desc": create_ragged_descriptor(act, [c.block_m, half // c.parts]),
        **schedule_arguments(schedule),
    }
    constants = {
        "E": num_experts,
        "F": f,
        "D": d,
        **tile_constants(c, programs, rows.dtype),
        "PARTS": c.parts,
        "BIAS": bias is not None,
        **activation.constants(),
        "FLATTEN": c.flatten,
    }
    return Launch(mx_up_swiglu_kernel, (programs,), arguments, constants, c)


def mx_up_swiglu(
    rows: Tensor,
    row_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    offsets: Tensor,
    *,
    bias: Tensor | None = None,
    activation: Activation = Activation(),
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:
    """rows [R, D], weight [E, 2F, D] and their swizzled scales → (z [R, 2F], a [R, F]) bf16."""
    num_rows, two_f = rows.shape[0], weight.shape[1]
    z = rows.new_empty(num_rows, two_f, dtype=torch.bfloat16)
    act = rows.new_empty(num_rows, two_f // 2, dtype=torch.bfloat16)
    if z.numel():
        tensors = (rows, row_scale, weight, weight_scale, offsets, z, act)
        mx_up_swiglu_launch(*tensors, bias=bias, activation=activation, config=config).run()
        zero_tail(offsets, z, act)
    return z, act
