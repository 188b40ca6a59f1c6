"""Rows that travel in MXFP8: a row's elements and, behind them, its scales, as bytes of one tensor.

    payload[n] = E4M3 of x[n, 0 … D-1] | E8M0 of its D/32 blocks        W = D + D/32 bytes, 33/64 of bf16

A payload is an ordinary uint8 matrix, so whatever moves rows moves it: `permute`, buckets, collectives, writes into the
memory of other ranks. Elements and scales never part, a row of zero bytes is a row of zeros, and what arrives is bit
for bit what was quantised. Formulas: `mx_format`, rounding `rceil`, so a block with NaN is NaN throughout after the
trip. On CUDA, from compute capability 8.9 on, moegraph's Triton kernels run; elsewhere the plain-torch formulas, which
give the same bits. Nothing here has a gradient.

Legend: N rows, D width, E experts, W bytes of a payload's row; R' padded rows as in `quantize`.
"""

import torch
from torch import Tensor

from moegraph.ops.mx_format import BLOCK, check_mx_input, mx_dequantize, mx_quantize
from moegraph.ops.mx_scales import TILE, num_tiles, swizzle_row_scales, zero_past
from moegraph.ops.quantize import uses_kernels


def payload_bytes(width: int) -> int:
    """W of rows of `width` elements, a multiple of 32."""
    return width + width // BLOCK


def payload_width(payload: Tensor) -> int:
    """D of a payload [N, W]. Raises ValueError for a tensor that is none."""
    width = payload.shape[1] // (BLOCK + 1) * BLOCK
    if payload.dtype != torch.uint8 or payload_bytes(width) != payload.shape[1]:
        raise ValueError(f"{payload.dtype} {list(payload.shape)} is no payload: rows of 33 bytes for every {BLOCK}")
    return width


def _parts(payload: Tensor) -> tuple[Tensor, Tensor]:
    """(elements [N, D] float8_e4m3fn, scales [N, D/32]) of a payload, as copies."""
    width = payload_width(payload)
    return payload[:, :width].contiguous().view(torch.float8_e4m3fn), payload[:, width:].contiguous()


@torch.library.custom_op("moegraph::mx_encode", mutates_args=())
def _mx_encode(x: Tensor) -> Tensor:
    check_mx_input(x, -1)
    if uses_kernels(x):
        from moegraph.kernels import mx_payload as kernels

        return kernels.mx_encode(x.contiguous())
    data, scale = mx_quantize(x)
    return torch.cat([data.view(torch.uint8), scale], dim=1)


@_mx_encode.register_fake
def _(x: Tensor) -> Tensor:
    check_mx_input(x, -1)
    return x.new_empty(x.shape[0], payload_bytes(x.shape[1]), dtype=torch.uint8)


@torch.library.custom_op("moegraph::mx_decode", mutates_args=())
def _mx_decode(payload: Tensor) -> Tensor:
    payload_width(payload)
    if uses_kernels(payload):
        from moegraph.kernels import mx_payload as kernels

        return kernels.mx_decode(payload.contiguous())
    return mx_dequantize(*_parts(payload))


@_mx_decode.register_fake
def _(payload: Tensor) -> Tensor:
    return payload.new_empty(payload.shape[0], payload_width(payload), dtype=torch.bfloat16)


@torch.library.custom_op("moegraph::mx_split", mutates_args=())
def _mx_split(payload: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    payload_width(payload)
    if uses_kernels(payload):
        from moegraph.kernels import mx_payload as kernels

        return kernels.mx_split(payload.contiguous(), offsets)
    data, scale = _parts(zero_past(payload, offsets))
    return data, swizzle_row_scales(scale, offsets)


@_mx_split.register_fake
def _(payload: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    width = payload_width(payload)
    data = payload.new_empty(payload.shape[0], width, dtype=torch.float8_e4m3fn)
    high = num_tiles(payload.shape[0], offsets.shape[0]) * TILE
    return data, payload.new_empty(high, -(-width // TILE) * TILE // BLOCK)


def mx_encode(x: Tensor) -> Tensor:
    """Rows x [N, D] bf16, fp16 or fp32 → their payload [N, W] uint8.

    Raises ValueError for another dtype, and D not a multiple of 32.
    """
    found: Tensor = _mx_encode(x)
    return found


def mx_decode(payload: Tensor) -> Tensor:
    """A payload [N, W] → rows [N, D] bf16: element · 2^(scale - 127), in fp32 and rounded once.

    Raises ValueError for what is no payload.
    """
    found: Tensor = _mx_decode(payload)
    return found


def mx_split(payload: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """A payload [N, W] of rows sorted by expert, offsets [E] → an operand of a block-scaled product, (data [N, D]
    float8_e4m3fn, scale [R', ⌈D⌉/32] swizzled), as `mx_quantize_rows` makes one of the rows themselves.

    Rows past offsets[-1] are zeros, whatever the payload holds there. Raises ValueError for what is no payload.
    """
    data, scale = _mx_split(payload, offsets)
    return data, scale
