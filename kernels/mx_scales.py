"""Scales of MX operands as Blackwell's tensor cores read them, for kernels.

An MX block is 32 elements along the contraction; its scale is a byte, the exponent of a power of two plus 127. The
bytes of 128 rows and 128 of the contraction form a block of 512, [32, 16], in the order that
`moegraph.ops.scaled_reference.swizzle` writes:

    weights   [E, ⌈N/128⌉, ⌈K/128⌉, 32, 16]
    rows      [B, ⌈K/128⌉, 32, 16]      every expert's rows start a new block, so that block i belongs to row block i of
                                        the schedule of 128 rows, and nothing else says where scales lie

What pads the contraction in a block is zero; what pads its rows does not matter.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

NOWHERE = tl.constexpr(1 << 24)  # a block past the end, loaded as zeros: of rows that do not exist, scales may be NaN


def scales_descriptor(scale: Tensor, rows: int, block_k: int) -> TensorDescriptor:
    """A descriptor of swizzled scales [.., B, C, 32, 16] that loads those of `rows` rows and block_k columns."""
    *_, blocks, columns, _, _ = scale.shape
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
