"""The experts' activation, row by row at memory speed: for products whose epilogue does not compute it.

    z [R, 2F] = [gate | up]  →  a [R, F], and a in 8 bits (quantized_rows.py) beside it or in its place

Rows past the last offset are written as zeros and not read; without offsets all rows exist. In 8 bits it has the bits
of quantising a as stored. A row's one scale (`fp8`) is known after all of the row: a is computed a second time then.

Legend: R rows, F expert width, E experts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moegraph.kernels.activation import Activation, gated
from moegraph.kernels.config import Config
from moegraph.kernels.e4m3 import amax_bits, on_hardware, quantized
from moegraph.kernels.fp8_quantize import scale_and_factor
from moegraph.kernels.launch import Launch
from moegraph.kernels.mx_scales import padded_places
from moegraph.kernels.quantized_rows import BLOCKS, FORMATS, FP8, MX, empty_rows, store_blocks, store_mx

_WIDTH = 1024  # columns at a time, as in gated_backward
_CONFIG = Config(num_warps=4)


@triton.jit
def _chunk(z_ptr, row, c, live, F: tl.constexpr, CLAMPED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """The activation of columns c, in the dtype of z."""
    gate = tl.load(z_ptr + 2 * row + c, mask=live, other=0.0).to(tl.float32)
    up = tl.load(z_ptr + 2 * row + F + c, mask=live, other=0.0).to(tl.float32)
    return gated(gate, up, CLAMPED, ALPHA, LIMIT).to(z_ptr.dtype.element_ty)


@triton.jit
def gated_forward_kernel(
    z_ptr,
    offsets_ptr,
    act_ptr,
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
    KEPT: tl.constexpr,
    FORMAT: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """BLOCK_M rows per program, BLOCK_N columns at a time. KEPT: in 16 bits; FORMAT: in 8. E = 0: all rows exist."""
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
        act = _chunk(z_ptr, row, c, real[:, None] & (c < F), F, CLAMPED, ALPHA, LIMIT)
        if KEPT:
            tl.store(act_ptr + row + c, act, mask=inside)
        x = act.to(tl.float32)
        if FORMAT == MX:
            store_mx(x, data_ptr, data_scale_ptr, r, place, first, inside, real, 0, F, F, BLOCK_M, BLOCK_N, HARDWARE)
        if FORMAT == BLOCKS:
            store_blocks(x, data_ptr, data_scale_ptr, r, num_rows, first, inside, 0, F, F, BLOCK_M, BLOCK_N, HARDWARE)
        if FORMAT == FP8:
            amax = tl.maximum(amax, amax_bits(x, 1, HARDWARE))
    if FORMAT == FP8:
        scale, factor = scale_and_factor(amax)
        tl.store(data_scale_ptr + r, scale, mask=r < num_rows)
        for first in range(0, F, BLOCK_N):
            c = first + tl.arange(0, BLOCK_N)[None, :]
            act = _chunk(z_ptr, row, c, real[:, None] & (c < F), F, CLAMPED, ALPHA, LIMIT).to(tl.float32)
            data = quantized(act, factor[:, None], HARDWARE)
            tl.store(data_ptr + row + c, data, mask=(r < num_rows)[:, None] & (c < F))


def gated_forward_launch(
    z: Tensor,
    offsets: Tensor | None,
    act: Tensor | None,
    in_8_bits: tuple[Tensor, Tensor] | None = None,
    name: str = "",
    *,
    activation: Activation = Activation(),
) -> Launch:
    """The launch that writes `act` [R, F], or `in_8_bits`: data [R, F] and scales in the format of that name, or both.
    F is whole blocks of what shares a scale; swizzled scales are zeros."""
    rows, f = z.shape[0], z.shape[1] // 2
    block_n = min(_WIDTH, triton.next_power_of_2(f))
    block_m = max(_WIDTH // block_n, 1)
    experts = 0 if offsets is None else offsets.shape[0]
    arguments = {
        "z_ptr": z,
        "offsets_ptr": z if offsets is None else offsets,
        "act_ptr": z if act is None else act,
        "data_ptr": z if in_8_bits is None else in_8_bits[0].view(torch.uint8),
        "data_scale_ptr": z if in_8_bits is None else in_8_bits[1],
        "num_rows": rows,
    }
    constants = {
        "E": experts,
        "E_PAD": triton.next_power_of_2(max(experts, 1)),
        "F": f,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        **activation.constants(),
        "KEPT": act is not None,
        "FORMAT": 0 if in_8_bits is None else FORMATS[name],
        "HARDWARE": on_hardware(),
    }
    return Launch(gated_forward_kernel, (triton.cdiv(rows, block_m),), arguments, constants, _CONFIG)


def gated_forward(
    z: Tensor, offsets: Tensor | None, name: str, *, kept: bool, activation: Activation = Activation()
) -> tuple[Tensor | None, Tensor, Tensor]:
    """z [R, 2F] contiguous, offsets [E] int32 → (a [R, F] where it is `kept`, its data [R, F], scale)."""
    rows, f = z.shape[0], z.shape[1] // 2
    act = z.new_empty(rows, f) if kept else None
    data, scale = empty_rows(z, rows, f, 0 if offsets is None else offsets.shape[0], name)
    if data.numel():
        gated_forward_launch(z, offsets, act, (data, scale), name, activation=activation).run()
    return act, data, scale
