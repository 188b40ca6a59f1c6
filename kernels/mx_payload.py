"""Rows that travel in MXFP8: from bf16, fp16 or fp32 to payloads and back, and payloads to operands of products.

    encode   payload[n] = E4M3 of x[n] | E8M0 of its blocks          rows of W = D + D/32 bytes
    decode   out[n]     = element · 2^(scale - 127), bf16
    split    data[n], swizzled scales of ragged rows                 bytes moved, none computed

Formulas, and what non-finite and tiny blocks become: `moegraph.ops.mx_format`, rounding `rceil`; payloads:
`moegraph.ops.mx_payload`. Results are the same bits as theirs. Programs take 32 rows and 128 columns each, in 16-byte
accesses where D is a multiple of 512 (so that W is one of 16); scales are four neighbouring bytes.

Legend: N rows, D width, W bytes of a payload's row, E experts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moegraph.kernels.config import Config
from moegraph.kernels.e4m3 import NAN_BYTE, amax_bits, on_hardware, quantized
from moegraph.kernels.launch import Launch
from moegraph.kernels.mx_quantize import scale_and_factor
from moegraph.kernels.tiles import Schedule, max_tiles, tile_schedule

_TILE = 128
_ROWS = tl.constexpr(32)
_ENCODE = Config(block_n=128, num_warps=2)
_MOVE = Config(block_n=128, num_warps=4)  # with 2 warps and rows of 2880, whose bytes are not aligned, `split` spills


@triton.jit
def from_e4m3(byte, HARDWARE: tl.constexpr):
    """E4M3 as uint8 → fp32. The interpreter has no such conversion, so there the bits are computed: magnitudes lie in
    fp32 as numbers 2^120 times smaller."""
    if HARDWARE:
        return byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    b = byte.to(tl.int32)
    bits = ((b & 0x7F) << 20) | ((b & 0x80) << 24)
    value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
    return tl.where((b & 0x7F) == NAN_BYTE, float("nan"), value)


@triton.jit
def decoded_scale(byte):
    """E8M0 as uint8 → fp32, 2^(byte - 127); 255 is NaN."""
    b = byte.to(tl.int32)
    bits = tl.where(b == 0, 0x00400000, b << 23)
    return tl.where(b == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def mx_encode_kernel(x_ptr, out_ptr, num_rows, D: tl.constexpr, HARDWARE: tl.constexpr, BLOCK_N: tl.constexpr):
    """32 rows and BLOCK_N columns per program; neighbours in the grid are neighbours in memory."""
    WIDTH: tl.constexpr = (D + BLOCK_N - 1) // BLOCK_N
    GROUPS: tl.constexpr = BLOCK_N // 32
    BYTES: tl.constexpr = D + D // 32
    column = tl.program_id(0) % WIDTH
    r = tl.program_id(0) // WIDTH * _ROWS + tl.arange(0, _ROWS)
    c = column * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (r < num_rows)[:, None] & (c < D)[None, :]
    row = r.to(tl.int64)[:, None]
    x = tl.load(x_ptr + row * D + c[None, :], mask=inside, other=0.0).to(tl.float32)
    blocks = tl.reshape(x, (_ROWS, GROUPS, 32))
    byte, factor = scale_and_factor(amax_bits(blocks, 2, HARDWARE))
    data = tl.reshape(quantized(blocks, factor[:, :, None], HARDWARE), (_ROWS, BLOCK_N))
    tl.store(out_ptr + row * BYTES + c[None, :], data, mask=inside)
    g = column * GROUPS + tl.arange(0, GROUPS)
    keep = (r < num_rows)[:, None] & (g < D // 32)[None, :]
    tl.store(out_ptr + row * BYTES + D + g[None, :], byte.to(tl.uint8), mask=keep)


@triton.jit
def mx_decode_kernel(payload_ptr, out_ptr, num_rows, D: tl.constexpr, HARDWARE: tl.constexpr, BLOCK_N: tl.constexpr):
    """32 rows and BLOCK_N columns per program."""
    WIDTH: tl.constexpr = (D + BLOCK_N - 1) // BLOCK_N
    GROUPS: tl.constexpr = BLOCK_N // 32
    BYTES: tl.constexpr = D + D // 32
    column = tl.program_id(0) % WIDTH
    r = tl.program_id(0) // WIDTH * _ROWS + tl.arange(0, _ROWS)
    c = column * BLOCK_N + tl.arange(0, BLOCK_N)
    g = column * GROUPS + tl.arange(0, GROUPS)
    inside = (r < num_rows)[:, None] & (c < D)[None, :]
    row = r.to(tl.int64)[:, None]
    data = tl.load(payload_ptr + row * BYTES + c[None, :], mask=inside, other=0)
    keep = (r < num_rows)[:, None] & (g < D // 32)[None, :]
    scale = decoded_scale(tl.load(payload_ptr + row * BYTES + D + g[None, :], mask=keep, other=0))
    blocks = tl.reshape(from_e4m3(data, HARDWARE), (_ROWS, GROUPS, 32)) * scale[:, :, None]
    value = tl.reshape(blocks, (_ROWS, BLOCK_N)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * D + c[None, :], value, mask=inside)


@triton.jit
def mx_split_kernel(
    payload_ptr,
    expert_ptr,
    first_ptr,
    last_ptr,
    data_ptr,
    scale_ptr,
    num_tiles,
    D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """32 rows of a tile of 128 and BLOCK_N columns per program. Rows past the last offset are zeros, and so are scales
    of what pads an expert's tiles and of tiles that no row uses."""
    HIGH: tl.constexpr = (D + 127) // 128  # blocks of swizzled scales along D
    WIDTH: tl.constexpr = (HIGH * 128 + BLOCK_N - 1) // BLOCK_N
    GROUPS: tl.constexpr = BLOCK_N // 32
    BYTES: tl.constexpr = D + D // 32
    column = tl.program_id(0) % WIDTH
    tile = tl.program_id(0) // WIDTH // 4
    part = tl.program_id(0) // WIDTH % 4
    expert = tl.load(expert_ptr + tile)
    last = tl.load(last_ptr + tile)
    exists = expert < E
    i = tl.arange(0, _ROWS)
    r = tl.load(first_ptr + tile) + part * _ROWS + i
    c = column * BLOCK_N + tl.arange(0, BLOCK_N)
    g = column * GROUPS + tl.arange(0, GROUPS)
    row = r.to(tl.int64)[:, None]
    here = (r < last)[:, None]
    inside = here & (c < D)[None, :]
    data = tl.load(payload_ptr + row * BYTES + c[None, :], mask=inside & exists, other=0)
    tl.store(data_ptr + row * D + c[None, :], data, mask=inside)
    keep = here & (g < D // 32)[None, :]
    scale = tl.load(payload_ptr + row * BYTES + D + g[None, :], mask=keep & exists, other=0)
    block = (tile.to(tl.int64) * HIGH + g // 4) * 512 + g % 4
    to = block[None, :] + (i * 16 + part * 4)[:, None]
    tl.store(scale_ptr + to, scale, mask=(g < HIGH * 4)[None, :] & (tile < num_tiles))


def payload_bytes(width: int) -> int:
    """W of rows of D = `width` elements."""
    return width + width // 32


def _grid(rows: int, width: int, config: Config) -> tuple[int]:
    return (triton.cdiv(rows, 32) * triton.cdiv(width, config.block_n),)


def mx_encode_launch(x: Tensor, out: Tensor) -> Launch:
    """The launch that writes the payload `out` [N, W] uint8 of x [N, D]."""
    rows, width = x.shape
    arguments = {"x_ptr": x, "out_ptr": out, "num_rows": rows}
    constants = {"D": width, "HARDWARE": on_hardware(), "BLOCK_N": _ENCODE.block_n}
    return Launch(mx_encode_kernel, _grid(rows, width, _ENCODE), arguments, constants, _ENCODE)


def mx_decode_launch(payload: Tensor, out: Tensor) -> Launch:
    """The launch that writes the rows `out` [N, D] of a payload [N, W]."""
    rows, width = out.shape
    arguments = {"payload_ptr": payload, "out_ptr": out, "num_rows": rows}
    constants = {"D": width, "HARDWARE": on_hardware(), "BLOCK_N": _MOVE.block_n}
    return Launch(mx_decode_kernel, _grid(rows, width, _MOVE), arguments, constants, _MOVE)


def mx_split_launch(payload: Tensor, offsets: Tensor, schedule: Schedule, data: Tensor, scale: Tensor) -> Launch:
    """The launch that writes data [N, D] and swizzled scales of a payload [N, W]; the schedule has tiles of 128, and
    those of rows past the last offset."""
    rows, width = data.shape
    experts = offsets.shape[0]
    arguments = {
        "payload_ptr": payload,
        "expert_ptr": schedule.expert,
        "first_ptr": schedule.first,
        "last_ptr": schedule.last,
        "data_ptr": data.view(torch.uint8),
        "scale_ptr": scale,
        "num_tiles": -(-rows // _TILE) + experts,
    }
    wide = triton.cdiv(-(-width // _TILE) * _TILE, _MOVE.block_n)
    grid = (max_tiles(rows, experts, _TILE) * 4 * wide,)
    return Launch(mx_split_kernel, grid, arguments, {"D": width, "E": experts, "BLOCK_N": _MOVE.block_n}, _MOVE)


def mx_encode(x: Tensor) -> Tensor:
    """x [N, D], contiguous, D a multiple of 32 → its payload [N, W] uint8."""
    out = x.new_empty(x.shape[0], payload_bytes(x.shape[1]), dtype=torch.uint8)
    if out.numel():
        mx_encode_launch(x, out).run()
    return out


def mx_decode(payload: Tensor) -> Tensor:
    """A payload [N, W] → rows [N, D] bf16."""
    out = payload.new_empty(payload.shape[0], payload.shape[1] // 33 * 32, dtype=torch.bfloat16)
    if out.numel():
        mx_decode_launch(payload, out).run()
    return out


def mx_split(payload: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """A payload [N, W] of ragged rows, offsets [E] int32 → (data [N, D] float8_e4m3fn, swizzled scales uint8)."""
    rows, width = payload.shape[0], payload.shape[1] // 33 * 32
    data = payload.new_empty(rows, width, dtype=torch.float8_e4m3fn)
    high = (-(-rows // _TILE) + offsets.shape[0]) * _TILE
    scale = payload.new_empty(high, -(-width // _TILE) * 4)
    mx_split_launch(payload, offsets, tile_schedule(offsets, rows, _TILE, tail=True), data, scale).run()
    return data, scale
