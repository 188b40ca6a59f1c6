"""The experts' activation, row by row at memory speed: for products whose epilogue does not compute it.

    z [R, 2F] = [gate | up]  →  a [R, F]

Rows past the last offset are written as zeros and not read.

Legend: R rows, F expert width, E experts.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moegraph.kernels.activation import Activation, gated
from moegraph.kernels.config import Config
from moegraph.kernels.launch import Launch

_WIDTH = 1024  # columns at a time, as in gated_backward
_CONFIG = Config(num_warps=4)


@triton.jit
def gated_forward_kernel(
    z_ptr,
    offsets_ptr,
    act_ptr,
    num_rows,
    E: tl.constexpr,
    F: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CLAMPED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """BLOCK_M rows per program, BLOCK_N columns at a time."""
    r = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    real = r < tl.load(offsets_ptr + E - 1)
    row = r.to(tl.int64)[:, None] * F
    for first in range(0, F, BLOCK_N):
        c = first + tl.arange(0, BLOCK_N)[None, :]
        live = real[:, None] & (c < F)
        gate = tl.load(z_ptr + 2 * row + c, mask=live, other=0.0).to(tl.float32)
        up = tl.load(z_ptr + 2 * row + F + c, mask=live, other=0.0).to(tl.float32)
        act = gated(gate, up, CLAMPED, ALPHA, LIMIT)
        tl.store(act_ptr + row + c, act.to(act_ptr.dtype.element_ty), mask=(r < num_rows)[:, None] & (c < F))


def gated_forward_launch(z: Tensor, offsets: Tensor, act: Tensor, *, activation: Activation = Activation()) -> Launch:
    """The launch that writes `act` [R, F]."""
    rows, f = act.shape
    block_n = min(_WIDTH, triton.next_power_of_2(f))
    block_m = max(_WIDTH // block_n, 1)
    arguments = {"z_ptr": z, "offsets_ptr": offsets, "act_ptr": act, "num_rows": rows}
    constants = {"E": offsets.shape[0], "F": f, "BLOCK_M": block_m, "BLOCK_N": block_n, **activation.constants()}
    return Launch(gated_forward_kernel, (triton.cdiv(rows, block_m),), arguments, constants, _CONFIG)
