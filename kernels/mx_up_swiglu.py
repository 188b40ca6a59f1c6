"""The MXFP8 up projection of the experts with the activation in its epilogue, for Blackwell's tensor cores.

    z[r] = dequantised rows[r] · dequantised W[e(r)]ᵀ (+ bias)      z [R, 2F] bf16 = [gate | up]
    a[r] = silu(gate) · up                                          a [R, F]; or the clamped SwiGLU (activation.py)

rows [R, D] and W [E, 2F, D] are float8_e4m3fn, gathered already, their scales swizzled (mx_scales.py). F is a multiple
of 128, so that the scales of the gate and of the up rows are whole blocks; D is one of 32. Each half has an accumulator
of its own. `a` is computed from z as stored, and is bf16, or in MXFP8 with swizzled scales, rounded to bf16 before:
the bits of quantising what would have been stored. So may z be then, with plain scales. Rows past the last offset are
written as zeros.

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
from moegraph.kernels.e4m3 import on_hardware
from moegraph.kernels.launch import (
    Launch,
    load_rows,
    persistent_programs,
    schedule_arguments,
    tile_constants,
    tile_of,
)
from moegraph.kernels.mx_epilogue import mx_up_epilogue
from moegraph.kernels.mx_quantize import empty_swizzled
from moegraph.kernels.mx_scales import load_scales, scales_descriptor
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
    act_scale_ptr,
    z_scale_ptr,
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
    BIAS: tl.constexpr,
    CLAMPED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    FLATTEN: tl.constexpr,
    QUANTIZED: tl.constexpr,
    SAVED: tl.constexpr,
    HARDWARE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """BLOCK_N counts gate and up columns together. QUANTIZED: the activation in MXFP8; SAVED: z too."""
    HALF: tl.constexpr = BLOCK_N // 2
    num_n: tl.constexpr = (F + HALF - 1) // HALF
    num_m = tl.load(count_ptr)
    for t in tl.range(tl.program_id(0), num_m * num_n, PROGRAMS, flatten=FLATTEN):
        pm, pn = tile_of(t, num_m, num_n, GROUP_M)
        e = tl.load(expert_ptr + pm)
        first = tl.load(first_ptr + pm)
        last = tl.load(last_ptr + pm)
        gate = tl.zeros((BLOCK_M, HALF), tl.float32)
        up = tl.zeros((BLOCK_M, HALF), tl.float32)
        for k in range(0, D, BLOCK_K):
            a = load_rows(rows_desc, first, last, k, BLOCK_M, BLOCK_K)
            sa = load_scales(row_scale_desc, 0, pm, k, BLOCK_M, BLOCK_K)
            b = weight_desc.load([2 * e, pn * HALF, k]).reshape(HALF, BLOCK_K).T
            sb = load_scales(weight_scale_desc, 2 * e, pn * (HALF // 128), k, HALF, BLOCK_K)
            gate = tl.dot_scaled(a, sa, "e4m3", b, sb, "e4m3", gate)
            b = weight_desc.load([2 * e + 1, pn * HALF, k]).reshape(HALF, BLOCK_K).T
            sb = load_scales(weight_scale_desc, 2 * e + 1, pn * (HALF // 128), k, HALF, BLOCK_K)
            up = tl.dot_scaled(a, sa, "e4m3", b, sb, "e4m3", up)
        rows, col = (first, last, bias_ptr + e * 2 * F), pn * HALF
        if QUANTIZED:
            tensors = (z_desc, z_scale_ptr, act_desc, act_scale_ptr)
            mx_up_epilogue(
                gate, up, col, rows, tensors, pm, BLOCK_M, HALF, PARTS, F, BIAS, CLAMPED, ALPHA, LIMIT, SAVED, HARDWARE
            )
        else:
            up_epilogue(gate, up, col, rows, (z_desc, act_desc), BLOCK_M, HALF, PARTS, F, BIAS, CLAMPED, ALPHA, LIMIT)


def mx_up_swiglu_launch(
    rows: Tensor,
    row_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    offsets: Tensor,
    z: Tensor,
    act: Tensor,
    act_scale: Tensor | None = None,
    z_scale: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    activation: Activation = Activation(),
    config: Config | None = None,
    schedule: Schedule | None = None,
) -> Launch:
    """The launch that writes `z` [R, 2F] and `act` [R, F]; `bias` [E, 2F] bf16. With `act_scale`, swizzled scales that
    are zeros, `act` is FP8; with `z_scale` [R, 2F/32] as well, z is."""
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
        "z_desc": create_ragged_descriptor(
            (z if z_scale is None else z.view(torch.uint8)).view(-1, 2, f), [c.block_m, 1, half // c.parts]
        ),
        "z_scale_ptr": z_scale if z_scale is not None else z,
        "act_desc": create_ragged_descriptor(
            act if act_scale is None else act.view(torch.uint8), [c.block_m, half // c.parts]
        ),
        "act_scale_ptr": act_scale if act_scale is not None else z,
        **schedule_arguments(schedule),
    }
    constants = {
        "F": f,
        "D": d,
        **tile_constants(c, programs, rows.dtype),
        "PARTS": c.parts,
        "BIAS": bias is not None,
        **activation.constants(),
        "FLATTEN": c.flatten,
        "QUANTIZED": act_scale is not None,
        "SAVED": z_scale is not None,
        "HARDWARE": on_hardware(),
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


def mx_up_swiglu_quantized(
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
    """As `mx_up_swiglu`, with the activation in MXFP8 → (z [R, 2F] bf16, data [R, F], swizzled scales)."""
    num_rows, (num_experts, two_f, _) = rows.shape[0], weight.shape
    z = rows.new_empty(num_rows, two_f, dtype=torch.bfloat16)
    data, scale = empty_swizzled(rows, num_rows, two_f // 2, num_experts)
    if z.numel():
        tensors = (rows, row_scale, weight, weight_scale, offsets, z, data, scale)
        mx_up_swiglu_launch(*tensors, bias=bias, activation=activation, config=config).run()
        zero_tail(offsets, z, data)
    return z, data, scale


def mx_up_swiglu_saved(
    rows: Tensor,
    row_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    offsets: Tensor,
    *,
    bias: Tensor | None = None,
    activation: Activation = Activation(),
    config: Config | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `mx_up_swiglu_quantized`, with z in MXFP8 too → (z data [R, 2F], its plain scales, data, swizzled scales)."""
    num_rows, (num_experts, two_f, _) = rows.shape[0], weight.shape
    z = rows.new_empty(num_rows, two_f, dtype=torch.float8_e4m3fn)
    z_scale = rows.new_empty(num_rows, two_f // 32, dtype=torch.uint8)
    data, scale = empty_swizzled(rows, num_rows, two_f // 2, num_experts)
    if z.numel():
        tensors = (rows, row_scale, weight, weight_scale, offsets, z, data, scale, z_scale)
        mx_up_swiglu_launch(*tensors, bias=bias, activation=activation, config=config).run()
        zero_tail(offsets, z, z_scale, data)
    return z, z_scale, data, scale
