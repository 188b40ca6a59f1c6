"""Scales of MX operands as Blackwell's tensor cores read them, for kernels.

An MX block is 32 elements along the contraction; its scale is a byte, the exponent of a power of two plus 127. The
bytes of 128 rows and 128 of the contraction are a block of 512, in the order that
`moegraph.ops.mx_scales.swizzle_scales` writes; blocks follow row by row:

    weights   [E, 128 · ⌈N/128⌉, 4 · ⌈K/128⌉]
    rows      [128 · B, 4 · ⌈K/128⌉]      every expert's rows start a new block, so that block i belongs to row block i
                                          of the schedule of 128 rows, and nothing else says where scales lie

What pads the contraction in a block is zero; what pads its rows does not matter.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

NOWHERE = tl.constexpr(1 << 24)  # a block past the end, loaded as zeros: of rows that do not exist, scales may be NaN


def scales_descriptor(scale: Tensor, rows: int, block_k: int) -> TensorDescriptor:
    """A descriptor of swizzled scales [.., 128 · B, 4 · C] that loads those of `rows` rows and block_k columns."""
    blocks, columns = scale.shape[-2] // 128, scale.shape[-1] // 4
    groups = scale.numel() // max(blocks * columns * 512, 1)
    shape = [groups, blocks, columns, 2, 256]
    strides = [blocks * columns * 512, columns * 512, 512, 256, 1]
    return TensorDescriptor(scale, shape, strides, [1, rows // 128, block_k // 128, 2, 256])


@triton.jit
def load_scales(desc, group, block, k, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Scales [ROWS, COLS / 32] from block row `block` of a group, for the contraction from k."""
    blocks: tl.constexpr = ROWS // 128
    columns: tl.constexpr = COLS // 128
    loaded = desc.load([group, block, k // 128, 0, 0])
    return loaded.reshape(blocks, columns, 32, 4, 4).trans(0, 3, 2, 1, 4).reshape(ROWS, COLS // 32)


def blocks_descriptor(scale: Tensor) -> TensorDescriptor:
    """A descriptor of swizzled scales, whatever their order, that loads one block of 128 × 4."""
    return TensorDescriptor(scale, [scale.numel() // 512, 2, 256], [512, 256, 1], [1, 2, 256])


@triton.jit
def load_scale_block(desc, block):
    """The scales [128, 4] of one block."""
    return desc.load([block, 0, 0]).reshape(1, 1, 32, 4, 4).trans(0, 3, 2, 1, 4).reshape(128, 4)


@triton.jit
def load_scale_blocks(scale_ptr, first, tile, wide, column, HIGH: tl.constexpr, used, ROWS: tl.constexpr):
    """Scales [ROWS, 4] of a ragged contraction: of a matrix whose blocks start with `first`, `wide` of them to a row of
    blocks and HIGH rows of them, those of rows tile · ROWS … and one column of blocks; zeros unless `used`."""
    blocks: tl.constexpr = ROWS // 128
    row = tile * blocks + tl.arange(0, blocks)
    block = (first + row * wide + column).to(tl.int64)
    at = block[:, None] * 512 + tl.arange(0, 512)[None, :]
    loaded = tl.load(scale_ptr + at, mask=((row < HIGH) & used)[:, None], other=0)
    return loaded.reshape(blocks, 1, 32, 4, 4).trans(0, 3, 2, 1, 4).reshape(ROWS, 4)


@triton.jit
def padded_places(r, offsets_ptr, E: tl.constexpr, E_PAD: tl.constexpr):
    """Rows r [N], int32, that exist → where they lie when every expert's run is padded to blocks of 128 rows [N]."""
    e = tl.arange(0, E_PAD)
    ends = tl.load(offsets_ptr + e, mask=e < E, other=0)
    begins = tl.load(offsets_ptr + e - 1, mask=(e > 0) & (e < E), other=0)
    padding = tl.where(e < E, (128 - (ends - begins) % 128) % 128, 0)
    return r + tl.sum(tl.where(ends[None, :] <= r[:, None], padding[None, :], 0), 1)
