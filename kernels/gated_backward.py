"""The backward of the experts' activation and of the router weight, row by row at memory speed.

da [R, F] is the gradient of the activation before the router weight s [R], z [R, 2F] = [gate | up]:

    ds = Σ_f da · a      dz = s · da · a'(z)  [R, 2F]      a_s = s · a  [R, F]

What the epilogue of `dgrad_swiglu` computes, for shapes where a product without that epilogue and this pass are
faster together. Rows past the last offset are written as zeros and not read. dz comes in 8 bits too where that is asked
for, in MXFP8 or in FP8 with a scale for 128 columns of a row (quantized_rows.py): the bits of quantising dz as stored.

Legend: R rows, F expert width, E experts.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from moegraph.kernels.activation import Activation, gated_slopes
from moegraph.kernels.config import Config
from moegraph.kernels.e4m3 import on_hardware
from moegraph.kernels.launch import Launch
from moegraph.kernels.mx_scales import padded_places
from moegraph.kernels.quantized_rows import BLOCKS, FORMATS, MX, store_blocks, store_mx

_WIDTH = 1024  # columns at a time; 256 to 2048 are within 4 % on H200
_CONFIG = Config(num_warps=4)


@triton.jit
def gated_backward_kernel(
    da_ptr,
    z_ptr,
    scale_ptr,
    offsets_ptr,
    dz_ptr,
    act_ptr,
    ds_ptr,
    data_ptr,
    data_scale_ptr,
    num_rows,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    F: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CLAMPED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    FORMAT: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """BLOCK_M rows per program, BLOCK_N columns at a time. FORMAT: of dz in 8 bits, MX or BLOCKS, or 0."""
    K: tl.constexpr = 2 * F
    r = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    real = r < tl.load(offsets_ptr + E - 1)
    s = tl.load(scale_ptr + r, mask=real, other=0.0)[:, None]
    row = r.to(tl.int64)[:, None] * F
    ds = tl.zeros((BLOCK_M,), tl.float32)
    if FORMAT == MX:
        place = padded_places(r, offsets_ptr, E, E_PAD)
    for first in range(0, F, BLOCK_N):
        c = first + tl.arange(0, BLOCK_N)[None, :]
        live = real[:, None] & (c < F)
        da = tl.load(da_ptr + row + c, mask=live, other=0.0).to(tl.float32)
        gate = tl.load(z_ptr + 2 * row + c, mask=live, other=0.0).to(tl.float32)
        up = tl.load(z_ptr + 2 * row + F + c, mask=live, other=0.0).to(tl.float32)
        act, by_gate, by_up = gated_slopes(gate, up, CLAMPED, ALPHA, LIMIT)
        ds += tl.sum(da * act, 1)
        da = da * s
        inside = (r < num_rows)[:, None] & (c < F)
        by_gate = (da * by_gate).to(dz_ptr.dtype.element_ty)
        by_up = (da * by_up).to(dz_ptr.dtype.element_ty)
        tl.store(dz_ptr + 2 * row + c, by_gate, mask=inside)
        tl.store(dz_ptr + 2 * row + F + c, by_up, mask=inside)
        gate_x = by_gate.to(tl.float32)
        up_x = by_up.to(tl.float32)
        to = data_scale_ptr
        if FORMAT == MX:
            store_mx(gate_x, data_ptr, to, r, place, first, inside, real, 0, F, K, BLOCK_M, BLOCK_N, HARDWARE)
            store_mx(up_x, data_ptr, to, r, place, first, inside, real, 1, F, K, BLOCK_M, BLOCK_N, HARDWARE)
        if FORMAT == BLOCKS:
            store_blocks(gate_x, data_ptr, to, r, num_rows, first, inside, 0, F, K, BLOCK_M, BLOCK_N, HARDWARE)
            store_blocks(up_x, data_ptr, to, r, num_rows, first, inside, 1, F, K, BLOCK_M, BLOCK_N, HARDWARE)
        tl.store(act_ptr + row + c, (act * s).to(act_ptr.dtype.element_ty), mask=inside)
    tl.store(ds_ptr + r, ds, mask=r < num_rows)


def gated_backward_launch(
    da: Tensor,
    z: Tensor,
    row_weight: Tensor,
    offsets: Tensor,
    dz: Tensor,
    act: Tensor,
    ds: Tensor,
    dz_quantized: tuple[Tensor, Tensor] | None = None,
    *,
    name: Literal["mx", "blocks"] = "mx",
    activation: Activation = Activation(),
) -> Launch:
    """The launch that writes `dz` [R, 2F], `act` [R, F] and `ds` [R] fp32, and where it is given `dz_quantized`: FP8
    data [R, 2F] and scales in the format of that name, swizzled ones zeros; F is whole blocks of what shares one."""
    rows, f = da.shape
    block_n = min(_WIDTH, triton.next_power_of_2(f))
    block_m = max(_WIDTH // block_n, 1)
    arguments = {
        "da_ptr": da,
        "z_ptr": z,
        "scale_ptr": row_weight,
        "offsets_ptr": offsets,
        "dz_ptr": dz,
        "act_ptr": act,
        "ds_ptr": ds,
        "data_ptr": ds if dz_quantized is None else dz_quantized[0].view(torch.uint8),
        "data_scale_ptr": ds if dz_quantized is None else dz_quantized[1],
        "num_rows": rows,
    }
    experts = offsets.shape[0]
    constants = {
        "E": experts,
        "E_PAD": triton.next_power_of_2(experts),
        "F": f,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        **activation.constants(),
        "FORMAT": 0 if dz_quantized is None else FORMATS[name],
        "HARDWARE": on_hardware(),
    }
    return Launch(gated_backward_kernel, (triton.cdiv(rows, block_m),), arguments, constants, _CONFIG)
