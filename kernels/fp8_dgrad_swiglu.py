"""The gradient of the FP8 down projection, with that of the activation and of the router weight in its epilogue.

    da = (grad[r] · W[e(r)]ᵀ) · grad_scale[r] · weight_scale[e(r)]          [R, F]
    dz = s · da · a'(z)  [R, 2F] bf16      a_s = s · a(z)  [R, F] bf16      ds = Σ_f da · a(z)  [R] fp32

grad [R, D] and W [E, F, D] are float8_e4m3fn: the down projection quantised along D, a copy of its own, since FP8
matrix units want the contraction last. Scales are fp32, grad_scale [R] and weight_scale [E, F]; z [R, 2F] bf16 is the
saved pre-activation, s [R] fp32 the router weight of a row. `dgrad_swiglu` has the rest of the contract, and the
meaning of `separate`.

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
from moegraph.kernels.config import Config, exact_config
from moegraph.kernels.fp8_rows_gemm import EXACT, fp8_grouped_mm
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
from moegraph.kernels.tiles import Schedule, tile_schedule
from moegraph.kernels.tuning import choose_config
from moegraph.kernels.zero_tail import zero_tail


@triton.jit
def fp8_dgrad_swiglu_kernel(
    grad_desc,
    weight_desc,
    grad_scale_ptr,
    weight_scale_ptr,
    z_desc,
    dz_desc,
    act_desc,
    row_weight_ptr,
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
    IMPRECISE: tl.constexpr,
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
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, D, BLOCK_K):
            g = load_rows(grad_desc, first, last, k, BLOCK_M, BLOCK_K)
            w = weight_desc.load([e, pn * BLOCK_N, k]).reshape(BLOCK_N, BLOCK_K).T
            acc = tl.dot(g, w, acc, max_num_imprecise_acc=IMPRECISE)
        r = first + tl.arange(0, BLOCK_M)
        c = pn * BLOCK_N + tl.arange(0, BLOCK_N)
        by_row = tl.load(grad_scale_ptr + r, mask=r < last, other=0.0)
        by_column = tl.load(weight_scale_ptr + e * F + c, mask=c < F, other=0.0)
        acc = acc * by_row[:, None] * by_column[None, :]
        s = tl.load(row_weight_ptr + r, mask=r < last, other=0.0)[:, None]
        rows, tensors = (first, last, last), (z_desc, dz_desc, act_desc)
        ds = gradient_epilogue(acc, s, pn * BLOCK_N, rows, tensors, BLOCK_M, BLOCK_N, PARTS, CLAMPED, ALPHA, LIMIT)
        tl.store(ds_ptr + r.to(tl.int64) * num_n + pn, ds, mask=r < last)


def fp8_dgrad_swiglu_launch(
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
    exact: bool = False,
    config: Config,
    schedule: Schedule | None = None,
) -> Launch:
    """The launch that writes `dz` [R, 2F], `act` [R, F] and `ds_parts` [R, column tiles] fp32."""
    _, f, d = weight.shape
    c = config
    schedule = schedule or tile_schedule(offsets, grad.shape[0], c.block_m)
    cols = c.block_n // c.parts
    programs = persistent_programs(grad.device)
    arguments = {
        "grad_desc": create_ragged_descriptor(grad, [c.block_m, c.block_k]),
        "weight_desc": TensorDescriptor.from_tensor(weight, [1, c.block_n, c.block_k]),
        "grad_scale_ptr": grad_scale,
        "weight_scale_ptr": weight_scale,
        "z_desc": create_ragged_descriptor(z.view(-1, 2, f), [c.block_m, 1, cols]),
        "dz_desc": create_ragged_descriptor(dz.view(-1, 2, f), [c.block_m, 1, cols]),
        "act_desc": create_ragged_descriptor(act, [c.block_m, cols]),
        "row_weight_ptr": row_weight,
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
        "IMPRECISE": min(EXACT, c.block_k) if exact else None,
    }
    return Launch(fp8_dgrad_swiglu_kernel, (programs,), arguments, constants, c)


def fp8_dgrad_swiglu(
    grad: Tensor,
    grad_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    z: Tensor,
    row_weight: Tensor,
    offsets: Tensor,
    *,
    activation: Activation = Activation(),
    exact: bool = False,
    config: Config | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """grad [R, D], grad_scale [R], weight [E, F, D], weight_scale [E, F], z [R, 2F], row_weight [R] →
    (dz [R, 2F] bf16, a_s [R, F] bf16, ds [R] fp32)."""
    rows, (num_experts, f, d) = grad.shape[0], weight.shape
    kernel = "grouped_mm" if activation.clamped else "dgrad_swiglu"  # clamped slopes need more registers
    c = config or choose_config(kernel, grad.dtype, f, d, rows, num_experts, grad.device).config
    c = replace(c, separate=True) if config is None and (exact or activation.clamped) else c
    c = exact_config(c) if exact and config is None else c
    dz, act = torch.empty_like(z), z.new_empty(rows, f)
    if c.separate:
        ds = grad_scale.new_empty(rows)
        plain = replace(c, separate=False)
        da = fp8_grouped_mm(grad, grad_scale, weight, weight_scale, offsets, exact=exact, config=plain)
        if dz.numel():
            gated_backward_launch(da, z, row_weight, offsets, dz, act, ds, activation=activation).run()
        return dz, act, ds
    parts = grad_scale.new_empty(rows, triton.cdiv(f, c.block_n))
    if dz.numel():
        tensors = (grad, grad_scale, weight, weight_scale, z, row_weight, offsets, dz, act, parts)
        fp8_dgrad_swiglu_launch(*tensors, activation=activation, exact=exact, config=c).run()
        zero_tail(offsets, dz, act, parts)
    return dz, act, parts[:, 0] if parts.shape[1] == 1 else parts.sum(1)
