"""MXFP8 weight gradient, for Blackwell's tensor cores: dW[e] = dequantised Gᵀ[:, run e] · dequantised X[run e, :].

    grad [P, N], rows [P, K]  float8_e4m3fn, as they are in memory: the contraction, over rows, comes first in both
    grad_scale [128 · ⌈N/128⌉, P/32], rows_scale [128 · ⌈K/128⌉, P/32]  uint8: a scale per 32 rows and column, swizzled
                              with each expert's blocks together (`moegraph.ops.mx_scales.swizzle_column_scales`)
    offsets [E] int32         inclusive ends of the experts' runs in P; each starts and ends at a multiple of 128
    dW [E, N, K] bf16 (or any float dtype that `out` has), accumulated in fp32

Rows that pad a run are zeros in both operands, as `mx_quantize_ragged_columns` writes them. What lies past the last
offset is not read. An expert without rows gets zeros. N and K are multiples of 16.

Legend: P padded rows, E experts, N and K the sizes of a weight.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moegraph.kernels.config import Config, mx_wgrad_config
from moegraph.kernels.launch import Launch, persistent_programs, tile_constants, tile_of
from moegraph.kernels.mx_scales import NOWHERE, blocks_descriptor, load_scale_block, load_scale_blocks

ALIGN = 128  # rows: what a run starts at a multiple of, and what a step takes


@triton.jit
def mx_wgrad_kernel(
    grad_desc,
    rows_desc,
    out_desc,
    grad_scale_desc,
    rows_scale_ptr,
    offsets_ptr,
    padded_rows,
    E: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    PARTS: tl.constexpr,
    FLATTEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Tiles of BLOCK_M = 128 × BLOCK_N of dW, expert by expert; BLOCK_K = 128 rows per step. A tile is stored in PARTS
    (1 or 2) column slices."""
    num_m: tl.constexpr = (N + BLOCK_M - 1) // BLOCK_M
    num_n: tl.constexpr = (K + BLOCK_N - 1) // BLOCK_N
    HIGH_N: tl.constexpr = (N + 127) // 128
    HIGH_K: tl.constexpr = (K + 127) // 128
    for t in tl.range(tl.program_id(0), E * num_m * num_n, PROGRAMS, flatten=FLATTEN):
        e = t // (num_m * num_n)
        pm, pn = tile_of(t % (num_m * num_n), num_m, num_n, GROUP_M)
        begin = tl.load(offsets_ptr + e - 1, mask=e > 0, other=0)
        end = tl.load(offsets_ptr + e)
        used = end > begin
        start, wide = begin // 128, (end - begin) // 128  # of the expert's blocks of scales
        begin = tl.where(used, begin, padded_rows)  # of an expert without rows one step reads zeros
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        steps = tl.maximum(wide, 1)
        tl.assume(steps > 0)
        for i in range(0, steps):
            r = begin + i * BLOCK_K
            g = grad_desc.load([r, pm * BLOCK_M])
            x = rows_desc.load([r, pn * BLOCK_N])
            sg = load_scale_block(grad_scale_desc, tl.where(used, start * HIGH_N + pm * wide + i, NOWHERE))
            sx = load_scale_blocks(rows_scale_ptr, start * HIGH_K, pn, wide, i, HIGH_K, used, BLOCK_N)
            acc = tl.dot_scaled(g.T, sg, "e4m3", x, sx, "e4m3", acc)
        if PARTS == 1:
            out_desc.store([e, pm * BLOCK_M, pn * BLOCK_N], acc.to(out_desc.dtype).reshape(1, BLOCK_M, BLOCK_N))
        else:
            HALF: tl.constexpr = BLOCK_N // 2
            left, right = tl.split(acc.reshape(BLOCK_M, 2, HALF).permute(0, 2, 1))
            out_desc.store([e, pm * BLOCK_M, pn * BLOCK_N], left.to(out_desc.dtype).reshape(1, BLOCK_M, HALF))
            out_desc.store([e, pm * BLOCK_M, pn * BLOCK_N + HALF], right.to(out_desc.dtype).reshape(1, BLOCK_M, HALF))


def mx_wgrad_launch(
    grad: Tensor,
    grad_scale: Tensor,
    rows: Tensor,
    rows_scale: Tensor,
    offsets: Tensor,
    out: Tensor,
    *,
    config: Config | None = None,
) -> Launch:
    """The launch that writes `out` [E, N, K]."""
    (padded, n), k, experts = grad.shape, rows.shape[1], offsets.shape[0]
    c = config or mx_wgrad_config(n, k)
    if c.block_k != ALIGN or c.block_m != 128 or c.block_n % 128:
        raise ValueError(f"mx_wgrad: a tile of {c} is not whole blocks of scales, one of the gradient's per step")
    programs = persistent_programs(grad.device)
    arguments = {
        "grad_desc": TensorDescriptor.from_tensor(grad, [c.block_k, c.block_m]),
        "rows_desc": TensorDescriptor.from_tensor(rows, [c.block_k, c.block_n]),
        "out_desc": TensorDescriptor.from_tensor(out, [1, c.block_m, c.block_n // c.parts]),
        "grad_scale_desc": blocks_descriptor(grad_scale),
        "rows_scale_ptr": rows_scale,
        "offsets_ptr": offsets,
        "padded_rows": padded,
    }
    constants = {
        "E": experts,
        "N": n,
        "K": k,
        **tile_constants(c, programs, grad.dtype),
        "PARTS": c.parts,
        "FLATTEN": c.flatten,
    }
    return Launch(mx_wgrad_kernel, (programs,), arguments, constants, c)


def mx_wgrad(
    grad: Tensor,
    grad_scale: Tensor,
    rows: Tensor,
    rows_scale: Tensor,
    offsets: Tensor,
    *,
    config: Config | None = None,
) -> Tensor:
    """grad [P, N], rows [P, K] and their swizzled scales, offsets [E] → dW [E, N, K] bf16."""
    out = grad.new_empty(offsets.shape[0], grad.shape[1], rows.shape[1], dtype=torch.bfloat16)
    if grad.shape[0] == 0:
        return out.zero_()
    if out.numel():
        mx_wgrad_launch(grad, grad_scale, rows, rows_scale, offsets, out, config=config).run()
    return out
