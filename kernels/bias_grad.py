"""Gradient of the experts' biases: db[e] = Σ of the rows of expert e, a sum over ragged rows at memory speed.

G [R, N] → db [E, N]. Each expert's rows are cut into the same number of parts, which depends on R and E only, so that
one expert with all the rows still fills the device and nothing waits for the host. A part is summed in fp32 (fp64 for
fp64) by one program per column block and written to a place of its own; the parts are then added in order: no atomics,
the same bits every time. Rows past the last offset are not read, and an expert without rows gets zeros.

Legend: R rows, E experts, N width, S parts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moegraph.kernels.config import Config
from moegraph.kernels.launch import Launch

_CONFIG = Config(block_m=32, block_n=128, num_warps=4)
_ROWS_PER_PART = 256  # of an expert with a balanced share of the rows
_MOST_PARTS = 64


def num_parts(rows: int, num_experts: int) -> int:
    """S: how many parts each expert's rows are summed in."""
    return min(max(rows // (num_experts * _ROWS_PER_PART), 1), _MOST_PARTS)


@triton.jit
def bias_grad_kernel(
    grad_ptr,
    offsets_ptr,
    parts_ptr,
    E: tl.constexpr,
    N: tl.constexpr,
    S: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Part `program_id(0) % S` of one expert and BLOCK_N columns per program, BLOCK_M rows per step."""
    WIDE: tl.constexpr = tl.float64 if grad_ptr.dtype.element_ty == tl.float64 else tl.float32
    e = tl.program_id(0) // S
    part = tl.program_id(0) % S
    begin = tl.load(offsets_ptr + e - 1, mask=e > 0, other=0)
    end = tl.load(offsets_ptr + e)
    share = tl.cdiv(end - begin, S)
    first = tl.minimum(begin + part * share, end)
    last = tl.minimum(first + share, end)
    c = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), WIDE)
    for i in range(0, tl.cdiv(last - first, BLOCK_M)):
        r = first + i * BLOCK_M + tl.arange(0, BLOCK_M)
        inside = (r < last)[:, None] & (c < N)[None, :]
        acc += tl.load(grad_ptr + r.to(tl.int64)[:, None] * N + c[None, :], mask=inside, other=0.0).to(WIDE)
    to = parts_ptr + (part * E + e).to(tl.int64) * N + c
    tl.store(to, tl.sum(acc, 0).to(parts_ptr.dtype.element_ty), mask=c < N)


def bias_grad_launch(grad: Tensor, offsets: Tensor, parts: Tensor) -> Launch:
    """The launch that writes `parts` [S, E, N], of fp32, fp64, or with one part any dtype."""
    c, (splits, num_experts, width) = _CONFIG, parts.shape
    arguments = {"grad_ptr": grad, "offsets_ptr": offsets, "parts_ptr": parts}
    block_n = min(c.block_n, triton.next_power_of_2(width))
    constants = {"E": num_experts, "N": width, "S": splits, "BLOCK_M": c.block_m, "BLOCK_N": block_n}
    return Launch(bias_grad_kernel, (num_experts * splits, triton.cdiv(width, block_n)), arguments, constants, c)


def bias_grad(grad: Tensor, offsets: Tensor) -> Tensor:
    """grad [R, N], offsets [E] int32 → db [E, N] in grad's dtype."""
    num_experts, width = offsets.shape[0], grad.shape[1]
    splits = num_parts(grad.shape[0], num_experts)
    wide = torch.float64 if grad.dtype == torch.float64 else torch.float32
    parts = grad.new_empty(splits, num_experts, width, dtype=grad.dtype if splits == 1 else wide)
    if parts.numel():
        bias_grad_launch(grad, offsets, parts).run()
    return parts[0] if splits == 1 else parts.sum(0).to(grad.dtype)
