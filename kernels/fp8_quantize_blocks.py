"""FP8 with fp32 scales in blocks from bf16, fp16 or fp32: rows in 1 × 128, weights in 128 × 128; read once.

Formulas: `moegraph.ops.quantize_blocks`; the same bits.

Legend: R rows, E experts, N and K the sizes of a weight.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moegraph.kernels.config import Config
from moegraph.kernels.e4m3 import amax_bits, on_hardware, quantized
from moegraph.kernels.fp8_quantize import scale_and_factor
from moegraph.kernels.launch import Launch

_BLOCK = 128
_ROWS = Config(block_m=32, num_warps=4)
_SQUARES = Config(block_m=128, num_warps=8)


@triton.jit
def fp8_blocks_kernel(
    x_ptr,
    offsets_ptr,
    data_ptr,
    scale_ptr,
    num_rows,
    N: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    HARDWARE: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """BLOCK_M rows and 128 columns per program. E > 0: ragged rows, a scale for each; else matrices of N rows, a scale
    for all."""
    WIDTH: tl.constexpr = K // 128
    block = tl.program_id(0) % WIDTH
    group = tl.program_id(0) // WIDTH
    i = tl.arange(0, BLOCK_M)
    c = block * 128 + tl.arange(0, 128)
    if E > 0:
        r = group * BLOCK_M + i
        inside = r < num_rows
        exists = inside & (r < tl.load(offsets_ptr + E - 1))
    else:
        HIGH: tl.constexpr = (N + BLOCK_M - 1) // BLOCK_M
        row = group % HIGH * BLOCK_M + i
        r = (group // HIGH) * N + row
        inside = row < N
        exists = inside
    at = r.to(tl.int64)[:, None] * K + c[None, :]
    x = tl.load(x_ptr + at, mask=exists[:, None], other=0.0).to(tl.float32)
    amax = amax_bits(x, 1, HARDWARE)
    if E > 0:
        scale, factor = scale_and_factor(amax)
        tl.store(scale_ptr + block.to(tl.int64) * num_rows + r, scale, mask=inside)
        data = quantized(x, factor[:, None], HARDWARE)
    else:
        scale, factor = scale_and_factor(tl.max(amax, 0))
        tl.store(scale_ptr + group.to(tl.int64) * WIDTH + block, scale)
        data = quantized(x, factor, HARDWARE)
    tl.store(data_ptr + at, data, mask=inside[:, None])


def fp8_blocks_launch(x: Tensor, offsets: Tensor | None, data: Tensor, scale: Tensor) -> Launch:
    """The launch that writes `data` as x and `scale`: [K/128, R] of ragged rows, [E, ⌈N/128⌉, K/128] of weights."""
    k, c = x.shape[-1], _SQUARES if offsets is None else _ROWS
    rows = x.numel() // max(k, 1)
    groups = triton.cdiv(rows, c.block_m) if offsets is not None else x.shape[0] * triton.cdiv(x.shape[1], _BLOCK)
    arguments = {
        "x_ptr": x,
        "offsets_ptr": x if offsets is None else offsets,
        "data_ptr": data.view(torch.uint8),
        "scale_ptr": scale,
        "num_rows": rows,
    }
    constants = {
        "N": x.shape[-2],
        "K": k,
        "E": 0 if offsets is None else offsets.shape[0],
        "HARDWARE": on_hardware(),
        "BLOCK_M": c.block_m,
    }
    if offsets is not None:
        constants["N"] = 0  # how many rows there are is no constant
    return Launch(fp8_blocks_kernel, (groups * (k // _BLOCK),), arguments, constants, c)


def fp8_quantize_blocks(x: Tensor, offsets: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x [R, K] with offsets [E] int32, or x [E, N, K]; contiguous, on the device, K % 128 = 0 → (data, scale)."""
    data, blocks = torch.empty_like(x, dtype=torch.float8_e4m3fn), x.shape[-1] // _BLOCK
    shape = (x.shape[0], triton.cdiv(x.shape[1], _BLOCK), blocks) if offsets is None else (blocks, x.shape[0])
    scale = x.new_empty(shape, dtype=torch.float32)
    if data.numel():
        fp8_blocks_launch(x, offsets, data, scale).run()
    return data, scale
