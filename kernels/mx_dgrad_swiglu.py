"""The gradient of the MXFP8 down projection, with that of the activation and of the router weight in its epilogue.

    da = dequantised grad[r] · dequantised W[e(r)]ᵀ                         [R, F]
    dz = s · da · a'(z)  [R, 2F] bf16      a_s = s · a(z)  [R, F] bf16      ds = Σ_f da · a(z)  [R] fp32

grad [R, D] and W [E, F, D] are float8_e4m3fn, the down projection quantised along D, their scales swizzled
(mx_scales.py); z [R, 2F] bf16 is the saved pre-activation, s [R] fp32 the router weight of a row. `dgrad_swiglu` has
the rest of the contract, and the meaning of `separate`. dz comes in MXFP8 too where that is asked for, with swizzled
scales, as the input gradient of the up projection reads it: the bits of quantising dz as stored. z may then be in MXFP8
with plain scales; it is rounded to bf16 first.

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
from moegraph.kernels.e4m3 import on_hardware
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
from moegraph.kernels.mx_dequantize import mx_dequantize
from moegraph.kernels.mx_epilogue import mx_gradient_epilogue
from moegraph.kernels.mx_quantize import empty_swizzled
from moegraph.kernels.mx_rows_gemm import mx_grouped_mm
from moegraph.kernels.mx_scales import load_scales, scales_descriptor
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
    dz_data_desc,
    dz_scale_ptr,
    z_ptr,
    z_scale_ptr,
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
    QUANTIZED: tl.constexpr,
    SAVED: tl.constexpr,
    HARDWARE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """F columns of the activation, contraction over D. QUANTIZED: dz in MXFP8 too; SAVED: z too."""
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
            sg = load_scales(grad_scale_desc, 0, pm, k, BLOCK_M, BLOCK_K)
            sw = load_scales(weight_scale_desc, e, pn * (BLOCK_N // 128), k, BLOCK_N, BLOCK_K)
            acc = tl.dot_scaled(g, sg, "e4m3", w, sw, "e4m3", acc)
        r = first + tl.arange(0, BLOCK_M)
        s = tl.load(row_weight_ptr + r, mask=r < last, other=0.0)[:, None]
        rows, tensors, col = (first, last), (z_desc, dz_desc, act_desc), pn * BLOCK_N
        if QUANTIZED:
            in_8_bits = (z_ptr, z_scale_ptr, dz_data_desc, dz_scale_ptr)
            ds = mx_gradient_epilogue(
                acc, s, col, rows, tensors, in_8_bits, pm,
                BLOCK_M, BLOCK_N, PARTS, F, CLAMPED, ALPHA, LIMIT, SAVED, HARDWARE,
            )  # fmt: skip
        else:
            ds = gradient_epilogue(acc, s, col, rows, tensors, BLOCK_M, BLOCK_N, PARTS, CLAMPED, ALPHA, LIMIT)
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
    dz_quantized: tuple[Tensor, Tensor] | None = None,
    z_scale: Tensor | None = None,
    activation: Activation = Activation(),
    config: Config,
    schedule: Schedule | None = None,
) -> Launch:
    """The launch that writes `dz` [R, 2F], `act` [R, F] and `ds_parts` [R, column tiles] fp32, and where it is given
    `dz_quantized`: FP8 data [R, 2F], and swizzled scales that are zeros. With `z_scale` [R, 2F/32] as well, z is FP8.
    """
    _, f, d = weight.shape
    c = config
    schedule = schedule or tile_schedule(offsets, grad.shape[0], c.block_m)
    cols = c.block_n // c.parts
    programs = persistent_programs(grad.device)
    dz_data, dz_scale = (dz, ds_parts) if dz_quantized is None else dz_quantized
    dz_data = dz_data if dz_quantized is None else dz_data.view(torch.uint8)
    arguments = {
        "grad_desc": create_ragged_descriptor(grad, [c.block_m, c.block_k]),
        "weight_desc": TensorDescriptor.from_tensor(weight, [1, c.block_n, c.block_k]),
        "grad_scale_desc": scales_descriptor(grad_scale, c.block_m, c.block_k),
        "weight_scale_desc": scales_descriptor(weight_scale, c.block_n, c.block_k),
        "z_desc": create_ragged_descriptor((z if z_scale is None else dz).view(-1, 2, f), [c.block_m, 1, cols]),
        "z_ptr": z if z_scale is None else z.view(torch.uint8),
        "z_scale_ptr": z_scale if z_scale is not None else ds_parts,
        "dz_desc": create_ragged_descriptor(dz.view(-1, 2, f), [c.block_m, 1, cols]),
        "act_desc": create_ragged_descriptor(act, [c.block_m, cols]),
        "dz_data_desc": create_ragged_descriptor(dz_data.view(-1, 2, f), [c.block_m, 1, cols]),
        "dz_scale_ptr": dz_scale,
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
        "QUANTIZED": dz_quantized is not None,
        "SAVED": z_scale is not None,
        "HARDWARE": on_hardware(),
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
    tensors = (grad, grad_scale, weight, weight_scale, z, row_weight, offsets)
    return _run(tensors, None, None, activation, config)


def mx_dgrad_swiglu_quantized(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As `mx_dgrad_swiglu`, and dz in MXFP8 → (dz, a_s, ds, data [R, 2F], swizzled scales)."""
    tensors = (grad, grad_scale, weight, weight_scale, z, row_weight, offsets)
    quantized = empty_swizzled(grad, z.shape[0], z.shape[1], weight.shape[0])
    return *_run(tensors, None, quantized, activation, config), *quantized


def mx_dgrad_swiglu_saved(
    grad: Tensor,
    grad_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    z: Tensor,
    z_scale: Tensor,
    row_weight: Tensor,
    offsets: Tensor,
    *,
    activation: Activation = Activation(),
    config: Config | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As `mx_dgrad_swiglu_quantized`, with z [R, 2F] FP8 and its plain scales [R, 2F/32]."""
    tensors = (grad, grad_scale, weight, weight_scale, z, row_weight, offsets)
    quantized = empty_swizzled(grad, z.shape[0], z.shape[1], weight.shape[0])
    return *_run(tensors, z_scale, quantized, activation, config), *quantized


def _run(
    tensors: tuple[Tensor, ...],
    z_scale: Tensor | None,
    quantized: tuple[Tensor, Tensor] | None,
    activation: Activation,
    config: Config | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dz, a_s and ds; dz goes to `quantized` too where it is given. With `z_scale` z is in MXFP8."""
    grad, grad_scale, weight, weight_scale, z, row_weight, offsets = tensors
    rows, (_, f, d) = grad.shape[0], weight.shape
    kernel = "dgrad_swiglu" if quantized is None else "dgrad_swiglu_quantized"
    c = config or mx_config(kernel if z_scale is None else "dgrad_swiglu_saved", f, d)
    if config is None and activation.clamped:  # its slopes do not fit in the registers of the fused epilogue
        c = replace(mx_config("grouped_mm", f, d), separate=True)
    dz, act = (z.new_empty(rows, width, dtype=torch.bfloat16) for width in (2 * f, f))
    if c.separate:
        ds = row_weight.new_empty(rows)
        plain = replace(c, separate=False)
        da = mx_grouped_mm(grad, grad_scale, weight, weight_scale, offsets, config=plain)
        if dz.numel():
            z = z if z_scale is None else mx_dequantize(z, z_scale)
            gated_backward_launch(da, z, row_weight, offsets, dz, act, ds, quantized, activation=activation).run()
        return dz, act, ds
    parts = row_weight.new_empty(rows, triton.cdiv(f, c.block_n))
    if dz.numel():
        given = (grad, grad_scale, weight, weight_scale, z, row_weight, offsets, dz, act, parts)
        mx_dgrad_swiglu_launch(*given, dz_quantized=quantized, z_scale=z_scale, activation=activation, config=c).run()
        zero_tail(offsets, dz, act, parts, *(() if quantized is None else quantized[:1]))
    return dz, act, parts[:, 0] if parts.shape[1] == 1 else parts.sum(1)
