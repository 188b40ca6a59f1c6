"""Weight gradient of a grouped product: dW[e] = Gᵀ · X over the rows of expert e, a contraction over ragged rows.

G [R, N], X [R, K] → dW [E, N, K]. Ragged descriptors give zeros past an expert's rows, so neither a neighbour's rows
nor what lies past the last offset enters, NaN included. An expert without rows gets zeros: every element is written.
With `accumulate` the product is added to what dW holds (an fp32 gradient buffer).

Legend: R rows, E experts, N and K the sizes of a weight.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.ragged_tma import create_ragged_descriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from moegraph.kernels.config import Config
from moegraph.kernels.launch import Launch, load_rows, persistent_programs, tile_constants, tile_of
from moegraph.kernels.tuning import choose_config


@triton.jit
def wgrad_kernel(
    grad_desc,
    rows_desc,
    out_desc,
    out_ptr,
    offsets_ptr,
    E: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    FLATTEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Tiles of BLOCK_M × BLOCK_N of dW, expert by expert; BLOCK_K rows per step."""
    num_m: tl.constexpr = (N + BLOCK_M - 1) // BLOCK_M
    num_n: tl.constexpr = (K + BLOCK_N - 1) // BLOCK_N
    for t in tl.range(tl.program_id(0), E * num_m * num_n, PROGRAMS, flatten=FLATTEN):
        e = t // (num_m * num_n)
        pm, pn = tile_of(t % (num_m * num_n), num_m, num_n, GROUP_M)
        begin = tl.load(offsets_ptr + e - 1, mask=e > 0, other=0)
        end = tl.load(offsets_ptr + e)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        steps = tl.maximum(tl.cdiv(end - begin, BLOCK_K), 1)  # of an expert without rows one step reads zeros
        tl.assume(steps > 0)
        for i in range(0, steps):
            r = begin + i * BLOCK_K
            g = load_rows(grad_desc, r, end, pm * BLOCK_M, BLOCK_K, BLOCK_M)
            x = load_rows(rows_desc, r, end, pn * BLOCK_N, BLOCK_K, BLOCK_N)
            acc = tl.dot(g.T, x, acc, input_precision=PRECISION)
        if ACCUMULATE:
            rm = pm * BLOCK_M + tl.arange(0, BLOCK_M)
            rn = pn * BLOCK_N + tl.arange(0, BLOCK_N)
            inside = (rm < N)[:, None] & (rn < K)[None, :]
            to = out_ptr + e.to(tl.int64) * N * K + rm.to(tl.int64)[:, None] * K + rn[None, :]
            acc += tl.load(to, mask=inside, other=0.0).to(tl.float32)
            tl.store(to, acc.to(out_ptr.dtype.element_ty), mask=inside)
        else:
            out_desc.store([e, pm * BLOCK_M, pn * BLOCK_N], acc.to(out_desc.dtype).reshape(1, BLOCK_M, BLOCK_N))


def wgrad_launch(
    grad: Tensor, rows: Tensor, offsets: Tensor, out: Tensor, *, accumulate: bool = False, config: Config | None = None
) -> Launch:
    """The launch that writes, or adds to, `out` [E, N, K]."""
    n, k = grad.shape[1], rows.shape[1]
    c = config or choose_config("wgrad", grad.dtype, n, k, grad.shape[0], offsets.shape[0], grad.device).config
    programs = persistent_programs(grad.device)
    arguments = {
        "grad_desc": create_ragged_descriptor(grad, [c.block_k, c.block_m]),
        "rows_desc": create_ragged_descriptor(rows, [c.block_k, c.block_n]),
        "out_desc": TensorDescriptor.from_tensor(out, [1, c.block_m, c.block_n]),
        "out_ptr": out,
        "offsets_ptr": offsets,
    }
    constants = {
        "E": offsets.shape[0],
        "N": n,
        "K": k,
        **tile_constants(c, programs, grad.dtype),
        "ACCUMULATE": accumulate,
        "FLATTEN": c.flatten,
    }
    return Launch(wgrad_kernel, (programs,), arguments, constants, c)


def wgrad(grad: Tensor, rows: Tensor, offsets: Tensor, *, config: Config | None = None) -> Tensor:
    """grad [R, N], rows [R, K] → dW [E, N, K] in their dtype."""
    out = grad.new_empty(offsets.shape[0], grad.shape[1], rows.shape[1])
    if grad.shape[0] == 0:
        return out.zero_()
    if out.numel():
        wgrad_launch(grad, rows, offsets, out, config=config).run()
    return out


def wgrad_accumulate(grad: Tensor, rows: Tensor, offsets: Tensor, out: Tensor, *, config: Config | None = None) -> None:
    """Adds the weight gradient to `out` [E, N, K], of any float dtype (an fp32 gradient buffer)."""
    if grad.shape[0] and out.numel():
        wgrad_launch(grad, rows, offsets, out, accumulate=True, config=config).run()
