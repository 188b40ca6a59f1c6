"""Gradient of an embedding, added to its buffer: W[id] += Σ of the gradients of the tokens with that id.

G [T, D], ids [T] → W [V, D]. Only the rows of W that a token has are read and written; a vocabulary is mostly others.
The ids are sorted (stably, so that the order of additions is that of the tokens); the first of each run of equal ids
is the work of one program per column block, the others have nothing to do: no atomics, the same bits every time.

Legend: T tokens, V vocabulary, D width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moegraph.kernels.config import Config
from moegraph.kernels.launch import Launch

_CONFIG = Config(block_m=8, block_n=512, num_warps=4)


@triton.jit
def embedding_grad_kernel(
    grad_ptr, ids_ptr, order_ptr, into_ptr, tokens, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """The run of equal ids that begins at program_id(0), if one does; BLOCK_N columns, BLOCK_M tokens per step."""
    first = tl.program_id(0)
    token_id = tl.load(ids_ptr + first)
    if tl.load(ids_ptr + first - 1, mask=first > 0, other=-1) != token_id:
        c = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        m = tl.arange(0, BLOCK_M)
        acc = tl.zeros((BLOCK_M, BLOCK_N), into_ptr.dtype.element_ty)
        at = first
        more = True
        while more:
            mine = tl.load(ids_ptr + at + m, mask=at + m < tokens, other=-1) == token_id
            row = tl.load(order_ptr + at + m, mask=mine, other=0)
            inside = mine[:, None] & (c < D)[None, :]
            acc += tl.load(grad_ptr + row[:, None] * D + c[None, :], mask=inside, other=0.0).to(acc.dtype)
            at += BLOCK_M
            more = tl.load(ids_ptr + at, mask=at < tokens, other=-1) == token_id
        to = into_ptr + token_id * D + c
        tl.store(to, tl.load(to, mask=c < D) + tl.sum(acc, 0), mask=c < D)


def embedding_grad_launch(grad: Tensor, ids: Tensor, order: Tensor, into: Tensor) -> Launch:
    """The launch that adds to `into` [V, D] of fp32 or fp64. grad [T, D]; ids [T] int64 sorted; order [T] int64: the
    tokens that they are of."""
    c, (tokens, width) = _CONFIG, grad.shape
    arguments = {"grad_ptr": grad, "ids_ptr": ids, "order_ptr": order, "into_ptr": into, "tokens": tokens}
    block_n = min(c.block_n, triton.next_power_of_2(width))
    constants = {"D": width, "BLOCK_M": c.block_m, "BLOCK_N": block_n}
    return Launch(embedding_grad_kernel, (tokens, triton.cdiv(width, block_n)), arguments, constants, c)


def embedding_grad_into(grad: Tensor, ids: Tensor, into: Tensor, *, accumulate: bool) -> None:
    """Adds the gradient to `into` [V, D], contiguous, or writes it there. grad [T, D], ids [T] int64."""
    if not accumulate:
        into.zero_()
    if grad.numel():
        ordered, order = torch.sort(ids, stable=True)
        embedding_grad_launch(grad.contiguous(), ordered, order, into).run()
