"""The gradient of the MXMX down projection, with that of the activation and of the router weight in its epilogue.

    da = dequantised grad[r] · dequantised W[e(r)]ᵀ                         [R, F]
    dz = s · da · a'(z)  [R, 2F] bf16      a_s = s · a(z)  [R, F] bf16      ds = Σ_f da · a(z)  [R] fp32

grad [R, D] and W [E, F, D] are float8_e4m3fn, the down projection quantised along D, their scales swizzled
(mx_scales.py); z [R, 2F] bf16 is the saved pre-activation, s [R] fp32 the router weight of a row. `dgrad_swiglu` has
the rest of the contract, and the meaning of `separate`.

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
from moegraph.kernels.config import Config, mx_config
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
from moegraph.kernels.mx_rows_gemm import mx_grouped_mm
from moegraph.kernels.mx_scales import NOWHERE, load_scales, scales_descriptor
from moegraph.kernels.tiles import Schedule, tile_schedule
from moegraph.kernels.zero_tail import zero_tail


@triton.jit
def mx_dgrad_swiglu_kernel(
    grad_desc,
    weight_desc,
    grad_scale_desc,
    weight_scale_desc,
    z_desc,
    dz_desc,
    act_desc,
    row_weight_ptr,
    ds_ptr,
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
    CLAMPED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    FLATTEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """F columns of the activation, contraction over D."""
    num_n: tl.constexpr = (F + BLOCK_N - 1) // BLOCK_N
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
        for k in range(0, D, BLOCK_K):
            g = load_rows(grad_desc, first, live, k, BLOCK_M, BLOCK_K)
            w = weight_desc.load([which, pn * BLOCK_N, k]).reshape(BLOCK_N, BLOCK_K).T
            sg = load_scales(grad_scale_desc, 0, block, k, BLOCK_M, BLOCK_K)
            sw = load_scales(weight_scale_desc, which, pn * (BLOCK_N // 128), k, BLOCK_N, BLOCK_K)
            acc = tl.dot_scaled(g, sg, "e4m3", w, sw, "e4m3", acc)
        r = first + tl.arange(0, BLOCK_M)
        s = tl.load(row_weight_ptr + r, mask=r < live, other=0.0)[:, None]
        rows, tensors = (first, last, live), (z_desc, dz_desc, act_desc)
        ds = gradient_epilogue(acc, s, pn * BLOCK_N, rows, tensors, BLOCK_M, BLOCK_N, PARTS, CLAMPED, ALPHA, LIMIT)
        tl.store(ds_ptr + r.to(tl.int64) * num_n + pn, ds, mask=r < last)


def mx_dgrad_swiglu_launch(
    grad: Tensor,
    grad_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
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
    num_experts, f, d = weight.shape
    c = config
    schedule = schedule or tile_schedule(offsets, grad.shape[0], c.block_m)
    cols = c.block_n // c.parts
    programs = persistent_programs(grad.device)
    arguments = {
        "grad_desc": create_ragged_descriptor(grad, [c.block_m, c.block_k]),
        "weight_desc": TensorDescriptor.from_tensor(weight, [1, c.block_n, c.block_k]),
        "grad_scale_desc": scales_descriptor(grad_scale, c.block_m, c.block_k),
        "weight_scale_desc": scales_descriptor(weight_scale, c.block_n, c.block_k),
        "z_desc": create_ragged_descriptor(z.view(-1, 2, f), [c.block_m, 1, cols]),
        "dz_desc": create_ragged_descriptor(dz.view(-1, 2, f), [c.block_m, 1, cols]),
        "act_desc": create_ragged_descriptor(act, [c.block_m, cols]),
        "row_weight_ptr": row_weight,
        "ds_ptr": ds_parts,
        **schedule_arguments(schedule),
    }
    constants = {
        "E": num_experts,
        "F": f,
        "D": d,
        **tile_constants(c, programs, grad.dtype),
        "PARTS": c.parts,
        **activation.constants(),
        "FLATTEN": c.flatten,
    }
    return Launch(mx_dgrad_swiglu_kernel, (programs,), arguments, constants, c)


def mx_dgrad_swiglu(
    grad: Tensor,
    grad_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    z: Tensor,
    row_weight: Tensor,
    offsets: Tensor,
    *,
    activation: Activation = Activation(),
    config: Config | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """grad [R, D], weight [E, F, D] and their swizzled scales, z [R, 2F], row_weight [R] →
    (dz [R, 2F] bf16, a_s [R, F] bf16, ds [R] fp32)."""
    rows, (_, f, d) = grad.shape[0], weight.shape
    c = config or mx_config("dgrad_swiglu", f, d)
    if config is None and activation.clamped:  # its slopes do not fit in the registers of the fused epilogue
        c = replace(mx_config("grouped_mm", f, d), separate=True)
    dz, act = torch.empty_like(z), z.new_empty(rows, f)
    if c.separate:
        ds = row_weight.new_empty(rows)
        plain = replace(c, separate=False)
        da = mx_grouped_mm(grad, grad_scale, weight, weight_scale, offsets, config=plain)
        if dz.numel():
            gated_backward_launch(da, z, row_weight, offsets, dz, act, ds, activation=activation).run()
        return dz, act, ds
    parts = row_weight.new_empty(rows, triton.cdiv(f, c.block_n))
    if dz.numel():
        tensors = (grad, grad_scale, weight, weight_scale, z, row_weight, offsets, dz, act, parts)
        mx_dgrad_swiglu_launch(*tensors, activation=activation, config=c).run()
        zero_tail(offsets, dz, act, parts)
    return dz, act, parts[:, 0] if parts.shape[1] == 1 else parts.sum(1)
