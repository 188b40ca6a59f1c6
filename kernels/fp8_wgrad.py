"""FP8 weight gradient: dW[e] = (Gᵀ[:, run e] · X[run e, :]) · grad_scale[e] · rows_scale[e].

    grad_t [N, P], rows_t [K, P]  float8_e4m3fn, rows of the product last, as FP8 matrix units want the contraction
    grad_scale [E, N], rows_scale [E, K]  fp32: a scale per expert and column
    offsets [E] int32  inclusive ends of the experts' runs in P, each run starting and ending at a multiple of ALIGN
    dW [E, N, K] bf16 (or any float dtype that `out` has)

Runs are padded to multiples of ALIGN; padding is zero in one of the two and finite in the other. What lies past the
last offset is not read. An expert without rows gets zeros, and its scales are not
read. Accumulated as `fp8_rows_gemm` says.

Legend: P padded rows, E experts, N and K the sizes of a weight.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moegraph.kernels.config import Config, exact_config
from moegraph.kernels.fp8_rows_gemm import EXACT
from moegraph.kernels.launch import Launch, persistent_programs, tile_constants, tile_of
from moegraph.kernels.tuning import choose_config

ALIGN = 128  # rows: what a run starts at a multiple of, and a multiple of every block_k


def padded_rows(rows: int, experts: int) -> int:
    """The room that R rows over E experts need at most, every expert's run padded to a multiple of ALIGN."""
    return -(-rows // ALIGN) * ALIGN + experts * ALIGN


@triton.jit
def fp8_wgrad_kernel(
    grad_desc,
    rows_desc,
    out_desc,
    grad_scale_ptr,
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
    IMPRECISE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Tiles of BLOCK_M × BLOCK_N of dW, expert by expert; BLOCK_K rows per step. A tile is stored in PARTS (1 or 2)
    column slices."""
    num_m: tl.constexpr = (N + BLOCK_M - 1) // BLOCK_M
    num_n: tl.constexpr = (K + BLOCK_N - 1) // BLOCK_N
    for t in tl.range(tl.program_id(0), E * num_m * num_n, PROGRAMS, flatten=FLATTEN):
        e = t // (num_m * num_n)
        pm, pn = tile_of(t % (num_m * num_n), num_m, num_n, GROUP_M)
        begin = tl.load(offsets_ptr + e - 1, mask=e > 0, other=0)
        end = tl.load(offsets_ptr + e)
        used = end > begin
        begin = tl.where(used, begin, padded_rows)  # of an expert without rows one step reads zeros
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        steps = tl.maximum(tl.cdiv(end - begin, BLOCK_K), 1)
        tl.assume(steps > 0)
        for i in range(0, steps):
            r = begin + i * BLOCK_K
            g = grad_desc.load([pm * BLOCK_M, r])
            x = rows_desc.load([pn * BLOCK_N, r])
            acc = tl.dot(g, x.T, acc, max_num_imprecise_acc=IMPRECISE)
        rm = pm * BLOCK_M + tl.arange(0, BLOCK_M)
        rn = pn * BLOCK_N + tl.arange(0, BLOCK_N)
        by_n = tl.load(grad_scale_ptr + e * N + rm, mask=used & (rm < N), other=0.0)
        by_k = tl.load(rows_scale_ptr + e * K + rn, mask=used & (rn < K), other=0.0)
        acc = acc * by_n[:, None] * by_k[None, :]
        if PARTS == 1:
            out_desc.store([e, pm * BLOCK_M, pn * BLOCK_N], acc.to(out_desc.dtype).reshape(1, BLOCK_M, BLOCK_N))
        else:
            HALF: tl.constexpr = BLOCK_N // 2
            left, right = tl.split(acc.reshape(BLOCK_M, 2, HALF).permute(0, 2, 1))
            out_desc.store([e, pm * BLOCK_M, pn * BLOCK_N], left.to(out_desc.dtype).reshape(1, BLOCK_M, HALF))
            out_desc.store([e, pm * BLOCK_M, pn * BLOCK_N + HALF], right.to(out_desc.dtype).reshape(1, BLOCK_M, HALF))


def fp8_wgrad_launch(
    grad_t: Tensor,
    grad_scale: Tensor,
    rows_t: Tensor,
    rows_scale: Tensor,
    offsets: Tensor,
    out: Tensor,
    *,
    exact: bool = False,
    config: Config | None = None,
) -> Launch:
    """The launch that writes `out` [E, N, K]."""
    (n, padded), k, experts = grad_t.shape, rows_t.shape[0], offsets.shape[0]
    rows = max(padded - experts * ALIGN, 0)  # about: what is left without the room for padding
    c = config or choose_config("wgrad", grad_t.dtype, n, k, rows, experts, grad_t.device).config
    c = exact_config(c) if exact and config is None else c
    if ALIGN % c.block_k:
        raise ValueError(
            f"fp8_wgrad: block_k {c.block_k} would cross experts, whose runs start at multiples of {ALIGN}"
        )
    programs = persistent_programs(grad_t.device)
    arguments = {
        "grad_desc": TensorDescriptor.from_tensor(grad_t, [c.block_m, c.block_k]),
        "rows_desc": TensorDescriptor.from_tensor(rows_t, [c.block_n, c.block_k]),
        "out_desc": TensorDescriptor.from_tensor(out, [1, c.block_m, c.block_n // c.parts]),
        "grad_scale_ptr": grad_scale,
        "rows_scale_ptr": rows_scale,
        "offsets_ptr": offsets,
        "padded_rows": padded,
    }
    constants = {
        "E": experts,
        "N": n,
        "K": k,
        **tile_constants(c, programs, grad_t.dtype),
        "PARTS": c.parts,
        "FLATTEN": c.flatten,
        "IMPRECISE": min(EXACT, c.block_k) if exact else None,
    }
    return Launch(fp8_wgrad_kernel, (programs,), arguments, constants, c)


def fp8_wgrad(
    grad_t: Tensor,
    grad_scale: Tensor,
    rows_t: Tensor,
    rows_scale: Tensor,
    offsets: Tensor,
    *,
    exact: bool = False,
    config: Config | None = None,
) -> Tensor:
    """grad_t [N, P], grad_scale [E, N], rows_t [K, P], rows_scale [E, K] → dW [E, N, K] bf16."""
    out = grad_t.new_empty(offsets.shape[0], grad_t.shape[0], rows_t.shape[0], dtype=torch.bfloat16)
    if grad_t.shape[1] == 0:
        return out.zero_()
    if out.numel():
        tensors = (grad_t, grad_scale, rows_t, rows_scale, offsets, out)
        fp8_wgrad_launch(*tensors, exact=exact, config=config).run()
    return out
