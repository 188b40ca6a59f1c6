"""MXFP8 along rows, with plain scales, back to bf16: data · 2^(scale - 127), in fp32 and rounded once.

Formulas: `moegraph.ops.mx_format`; the same bits. At memory speed: of neighbouring elements, 32 share a scale, and the
scale of element i of a contiguous tensor is number i / 32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moegraph.kernels.config import Config
from moegraph.kernels.launch import Launch

_BLOCK = 2048  # elements per program, not measured
_CONFIG = Config(num_warps=4)


@triton.jit
def decoded_scale(byte):
    """Scale bytes, int32 → what they stand for, fp32; byte 0 is subnormal, 255 is NaN."""
    bits = tl.where(byte == 0, 0x00400000, byte << 23)
    return tl.where(byte == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def mx_dequantize_kernel(data_ptr, scale_ptr, out_ptr, num_blocks, BLOCK: tl.constexpr):
    """BLOCK elements per program."""
    GROUPS: tl.constexpr = BLOCK // 32
    g = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    at = g[:, None] * 32 + tl.arange(0, 32)[None, :]
    inside = (g < num_blocks)[:, None]
    data = tl.load(data_ptr + at, mask=inside, other=0).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    byte = tl.load(scale_ptr + g, mask=g < num_blocks, other=127).to(tl.int32)
    out = data * decoded_scale(byte)[:, None]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=inside)


def mx_dequantize_launch(data: Tensor, scale: Tensor, out: Tensor) -> Launch:
    """The launch that writes `out`, of the shape of `data` [.., K]; `scale` [.., K/32]."""
    blocks = scale.numel()
    arguments = {"data_ptr": data.view(torch.uint8), "scale_ptr": scale, "out_ptr": out, "num_blocks": blocks}
    return Launch(mx_dequantize_kernel, (triton.cdiv(blocks, _BLOCK // 32),), arguments, {"BLOCK": _BLOCK}, _CONFIG)


def mx_dequantize(data: Tensor, scale: Tensor) -> Tensor:
    """data [.., K] FP8 and scale [.., K/32] uint8, contiguous, on the device → [.., K] bf16."""
    out = torch.empty_like(data, dtype=torch.bfloat16)
    if out.numel():
        mx_dequantize_launch(data, scale, out).run()
    return out
