"""The k largest scores of each token, in the order of a stable descending sort.

    out[t] = torch.sort(scores[t], descending=True, stable=True).indices[:K]

Equal scores: the lowest expert id first, -0.0 being equal to 0.0. NaN is above every number, all NaN being equal.

A score becomes an int32 that orders the same way; then K times the largest is found, the lowest id that has it, and
that expert is taken out. Everything stays in registers and integers, so the choice is exact, whatever the scores.

Legend: T tokens, E experts, K top-k.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moegraph.kernels.config import Config
from moegraph.kernels.launch import Launch

MAX_EXPERTS = 1024
_TILE = 512  # scores per warp


@triton.jit
def ordered_key(score):
    """fp32 → int32 in the same order: NaN highest, -0.0 as 0.0, every key above the least int32."""
    bits = score.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    key = tl.where(bits < 0, -size, size)
    return tl.where(size > 0x7F800000, 0x7FFFFFFF, key)


@triton.jit
def top_k_kernel(
    scores_ptr,
    out_ptr,
    num_tokens,
    K: tl.constexpr,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """BLOCK_T tokens per program."""
    least: tl.constexpr = -0x80000000
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.arange(0, E_PAD)[None, :]
    exists = t < num_tokens
    row = t.to(tl.int64)
    score = tl.load(scores_ptr + row[:, None] * E + e, mask=exists[:, None] & (e < E), other=0.0)
    key = tl.where(e < E, ordered_key(score), least)
    for j in range(K):
        best = tl.max(key, 1)
        expert = tl.min(tl.where(key == best[:, None], e, E_PAD), 1)
        tl.store(out_ptr + row * K + j, expert, mask=exists)
        key = tl.where(e == expert[:, None], least, key)


def default_config(experts: int) -> Config:
    """Whole tokens per warp, so that no round waits for another warp: past 128 experts, by one warp per program."""
    e_pad = triton.next_power_of_2(experts)
    num_warps = 4 if e_pad <= 128 else 1
    return Config(block_m=max(num_warps * _TILE // e_pad, 1), block_n=e_pad, num_warps=num_warps)


def top_k_launch(scores: Tensor, out: Tensor) -> Launch:
    """The launch that writes `out` [T, K] int32."""
    (tokens, experts), top_k = scores.shape, out.shape[1]
    c = default_config(experts)
    arguments = {"scores_ptr": scores, "out_ptr": out, "num_tokens": tokens}
    constants = {"K": top_k, "E": experts, "E_PAD": c.block_n, "BLOCK_T": c.block_m}
    return Launch(top_k_kernel, (triton.cdiv(tokens, c.block_m),), arguments, constants, c)


def top_k(scores: Tensor, k: int) -> Tensor:
    """Scores [T, E] float32 → ids [T, K] int32, best first.

    Raises ValueError for another dtype, more than 1024 experts, or k outside 1 … E.
    """
    experts = scores.shape[1]
    if scores.dtype != torch.float32 or experts > MAX_EXPERTS or not 1 <= k <= experts:
        raise ValueError(
            f"top {k} of {experts} {scores.dtype} scores: at most {MAX_EXPERTS} float32 scores, k between 1 and those"
        )
    out = torch.empty(scores.shape[0], k, dtype=torch.int32, device=scores.device)
    if out.numel():
        top_k_launch(scores.contiguous(), out).run()
    return out
