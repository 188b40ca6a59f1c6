"""The gradient of the experts' activation, and the same in 8 bits, row by row at memory speed.

    da [R, F], z [R, 2F] = [gate | up]  →  dz [R, 2F] = da · a'(z), and dz in 8 bits (quantized_rows.py)

For experts whose router weights are applied elsewhere; `gated_backward` has those as well. Rows past the last offset
are written as zeros and not read; without offsets all rows exist. In 8 bits it has the bits of quantising dz as stored.
A row's one scale (`fp8`) is known after all of the row: dz is computed a second time then.

Legend: R rows, F expert width, E experts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moegraph.kernels.activation import Activation, gated_gradients
from moegraph.kernels.config import Config
from moegraph.kernels.e4m3 import amax_bits, on_hardware, quantized
from moegraph.kernels.fp8_quantize import scale_and_factor
from moegraph.kernels.launch import Launch
from moegraph.kernels.mx_scales import padded_places
from moegraph.kernels.quantized_rows import BLOCKS, FORMATS, FP8, MX, empty_rows, store_blocks, store_mx

_WIDTH = 1024  # columns at a time, as in gated_backward
_CONFIG = Config(num_warps=4)


@triton.jit
def _chunk(
    da_ptr, z_ptr, row, c, live, F: tl.constexpr, CLAMPED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr
):
    """dz of the gate's and of the up half's columns c, in the dtype of z."""
    da = tl.load(da_ptr + row + c, mask=live, other=0.0).to(tl.float32)
    gate = tl.load(z_ptr + 2 * row + c, mask=live, other=0.0).to(tl.float32)
    up = tl.load(z_ptr + 2 * row + F + c, mask=live, other=0.0).to(tl.float32)
    by_gate, by_up = gated_gradients(da, gate, up, CLAMPED, ALPHA, LIMIT)
    return by_gate.to(z_ptr.dtype.element_ty), by_up.to(z_ptr.dtype.element_ty)


@triton.jit
def gated_gradient_kernel(
    da_ptr,
    z_ptr,
    offsets_ptr,
    dz_ptr,
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
    """BLOCK_M rows per program, BLOCK_N columns of each half at a time. E = 0: all rows exist."""
    K: tl.constexpr = 2 * F
    r = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    real = r < num_rows
    place = r
    if E > 0:
        real = real & (r < tl.load(offsets_ptr + E - 1))
        if FORMAT == MX:
            place = padded_places(r, offsets_ptr, E, E_PAD)
    row = r.to(tl.int64)[:, None] * F
    amax = tl.zeros((BLOCK_M,), tl.int32)
    for first in range(0, F, BLOCK_N):
        c = first + tl.arange(0, BLOCK_N)[None, :]
        inside = (r < num_rows)[:, None] & (c < F)
        gate, up = _chunk(da_ptr, z_ptr, row, c, real[:, None] & (c < F), F, CLAMPED, ALPHA, LIMIT)
        tl.store(dz_ptr + 2 * row + c, gate, mask=inside)
        tl.store(dz_ptr + 2 * row + F + c, up, mask=inside)
        gate = gate.to(tl.float32)
        up = up.to(tl.float32)
        if FORMAT == MX:
            store_mx(gate, data_ptr, data_scale_ptr, r, place, first, inside, real, 0, F, K, BLOCK_M, BLOCK_N, HARDWARE)
            store_mx(up, data_ptr, data_scale_ptr, r, place, first, inside, real, 1, F, K, BLOCK_M, BLOCK_N, HARDWARE)
        if FORMAT == BLOCKS:
            to = data_scale_ptr
            store_blocks(gate, data_ptr, to, r, num_rows, first, inside, 0, F, K, BLOCK_M, BLOCK_N, HARDWARE)
            store_blocks(up, data_ptr, to, r, num_rows, first, inside, 1, F, K, BLOCK_M, BLOCK_N, HARDWARE)
        if FORMAT == FP8:
            amax = tl.maximum(amax, tl.maximum(amax_bits(gate, 1, HARDWARE), amax_bits(up, 1, HARDWARE)))
    if FORMAT == FP8:
        scale, factor = scale_and_factor(amax)
        tl.store(data_scale_ptr + r, scale, mask=r < num_rows)
        for first in range(0, F, BLOCK_N):
            c = first + tl.arange(0, BLOCK_N)[None, :]
            inside = (r < num_rows)[:, None] & (c < F)
            gate, up = _chunk(da_ptr, z_ptr, row, c, real[:, None] & (c < F), F, CLAMPED, ALPHA, LIMIT)
            to = data_ptr + 2 * row + c
            tl.store(to, quantized(gate.to(tl.float32), factor[:, None], HARDWARE), mask=inside)
            tl.store(to + F, quantized(up.to(tl.float32), factor[:, None], HARDWARE), mask=inside)


def gated_gradient_launch(
    da: Tensor,
    z: Tensor,
    offsets: Tensor | None,
    dz: Tensor,
    in_8_bits: tuple[Tensor, Tensor],
    name: str,
    *,
    activation: Activation = Activation(),
) -> Launch:
    """The launch that writes `dz` [R, 2F] and `in_8_bits`: data [R, 2F] and scales in the format of that name. F is
    whole blocks of what shares a scale; swizzled scales are zeros."""
    rows, f = da.shape
    block_n = min(_WIDTH, triton.next_power_of_2(f))
    block_m = max(_WIDTH // block_n, 1)
    experts = 0 if offsets is None else offsets.shape[0]
    arguments = {
        "da_ptr": da,
        "z_ptr": z,
        "offsets_ptr": z if offsets is None else offsets,
        "dz_ptr": dz,
        "data_ptr": in_8_bits[0].view(torch.uint8),
        "data_scale_ptr": in_8_bits[1],
        "num_rows": rows,
    }
    constants = {
        "E": experts,
        "E_PAD": triton.next_power_of_2(max(experts, 1)),
        "F": f,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        **activation.constants(),
        "FORMAT": FORMATS[name],
        "HARDWARE": on_hardware(),
    }
    return Launch(gated_gradient_kernel, (triton.cdiv(rows, block_m),), arguments, constants, _CONFIG)


def gated_gradient(
    da: Tensor, z: Tensor, offsets: Tensor | None, name: str, *, activation: Activation = Activation()
) -> tuple[Tensor, Tensor, Tensor]:
    """da [R, F] and z [R, 2F] contiguous, offsets [E] int32 → (dz [R, 2F], its data [R, 2F], scale)."""
    rows, two_f = z.shape
    dz = torch.empty_like(z)
    data, scale = empty_rows(z, rows, two_f, 0 if offsets is None else offsets.shape[0], name)
    if data.numel():
        gated_gradient_launch(da, z, offsets, dz, (data, scale), name, activation=activation).run()
    return dz, data, scale
