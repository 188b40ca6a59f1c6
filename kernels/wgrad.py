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
def _halves(tile, M: tl.constexpr, N: tl.constexpr):
    """The left and the right half of the columns."""
    return tl.split(tile.reshape(M, 2, N // 2).permute(0, 2, 1))


@triton.jit
def _put(desc, e, row, col, tile, M: tl.constexpr, N: tl.constexpr, HOW: tl.constexpr):
    """A tile to its place in dW[e]: written, or added by the memory system, so that nothing is read here. An element
    has one adder per launch, so the order of additions is that of the launches."""
    if HOW == "write":
        desc.store([e, row, col], tile.to(desc.dtype).reshape(1, M, N))
    elif HOW == "add":
        desc.atomic_add([e, row, col], tile.to(desc.dtype).reshape(1, M, N))
    else:  # the interpreter knows no addition to a descriptor
        to = desc.load([e, row, col]).reshape(M, N).to(tl.float32) + tile
        desc.store([e, row, col], to.to(desc.dtype).reshape(1, M, N))


@triton.jit
def put_tile(desc, e, row, col, acc, M: tl.constexpr, N: tl.constexpr, PARTS: tl.constexpr, HOW: tl.constexpr):
    """A tile of dW[e] to its place, in PARTS (1 or 4) column slices; HOW: write, add, or read and write."""
    if PARTS == 1:
        _put(desc, e, row, col, acc, M, N, HOW)
    else:  # little by little: a tile in fp32 does not fit beside the operands
        QUARTER: tl.constexpr = N // 4
        left, right = _halves(acc, M, N)
        first, second = _halves(left, M, N // 2)
        third, fourth = _halves(right, M, N // 2)
        _put(desc, e, row, col, first, M, QUARTER, HOW)
        _put(desc, e, row, col + QUARTER, second, M, QUARTER, HOW)
        _put(desc, e, row, col + 2 * QUARTER, third, M, QUARTER, HOW)
        _put(desc, e, row, col + 3 * QUARTER, fourth, M, QUARTER, HOW)


@triton.jit
def wgrad_kernel(
    grad_desc,
    rows_desc,
    out_desc,
    offsets_ptr,
    E: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    PARTS: tl.constexpr,
    HOW: tl.constexpr,
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
        put_tile(out_desc, e, pm * BLOCK_M, pn * BLOCK_N, acc, BLOCK_M, BLOCK_N, PARTS, HOW)


def how_to_put(accumulate: bool) -> str:
    """How a tile reaches dW, as `put_tile` has it."""
    adds = "read and write" if triton.knobs.runtime.interpret else "add"
    return adds if accumulate else "write"


def wgrad_launch(
    grad: Tensor,
    rows: Tensor,
    offsets: Tensor,
    out: Tensor,
    *,
    accumulate: bool = False,
    config: Config | None = None,
) -> Launch:
    """The launch that writes, or adds to, `out` [E, N, K]."""
    n, k = grad.shape[1], rows.shape[1]
    c = config or choose_config("wgrad", grad.dtype, n, k, grad.shape[0], offsets.shape[0], grad.device).config
    programs = persistent_programs(grad.device)
    parts = 4 if out.element_size() > grad.element_size() else 1
    arguments = {
        "grad_desc": create_ragged_descriptor(grad, [c.block_k, c.block_m]),
        "rows_desc": create_ragged_descriptor(rows, [c.block_k, c.block_n]),
        "out_desc": TensorDescriptor.from_tensor(out, [1, c.block_m, c.block_n // parts]),
        "offsets_ptr": offsets,
    }
    constants = {
        "E": offsets.shape[0],
        "N": n,
        "K": k,
        **tile_constants(c, programs, grad.dtype),
        "PARTS": parts,
        "HOW": how_to_put(accumulate),
        "FLATTEN": c.flatten,
    }
    return Launch(wgrad_kernel, (programs,), arguments, constants, c)


def wgrad(grad: Tensor, rows: Tensor, offsets: Tensor, *, config: Config | None = None) -> Tensor:
    """grad [R, N], rows [R, K] → dW [E, N, K] in their dtype."""
    out = grad.new_empty(offsets.shape[0], grad.shape[1], rows.shape[1])
    if grad.shape[0] == 0:
        return out.zero_()
    wgrad_into(grad, rows, offsets, out, config=config)
    return out


def wgrad_into(
    grad: Tensor, rows: Tensor, offsets: Tensor, out: Tensor, *, accumulate: bool = False, config: Config | None = None
) -> None:
    """Writes the weight gradient to `out` [E, N, K], or adds it there. `out` is of the rows' dtype or fp32, contiguous,
    and starts at a multiple of 16 bytes; there are rows."""
    if out.numel():
        wgrad_launch(grad, rows, offsets, out, accumulate=accumulate, config=config).run()
