"""The launch of one grouped product, on meta tensors: to be compiled and inspected without a GPU.

Where `dgrad_swiglu` runs its epilogue as a kernel of its own (`Config.separate`), this is the product in front of it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from moegraph.kernels.config import FP8, Config
from moegraph.kernels.dgrad_swiglu import dgrad_swiglu_launch
from moegraph.kernels.fp8_products import fp8_product_launch
from moegraph.kernels.launch import Launch
from moegraph.kernels.rows_gemm import grouped_mm_launch
from moegraph.kernels.shapes import Problem
from moegraph.kernels.tiles import Schedule, max_tiles
from moegraph.kernels.up_swiglu import up_swiglu_launch
from moegraph.kernels.wgrad import wgrad_launch


def product_launch(problem: Problem, config: Config, *, row_weight: bool = False, accumulate: bool = False) -> Launch:
    """The launch of a problem with a configuration. `row_weight`: the rows of the result are scaled (`grouped_mm`);
    `accumulate`: the result is added to an fp32 gradient buffer (`wgrad`)."""
    if problem.dtype == FP8:
        return fp8_product_launch(problem, config, row_weight=row_weight)
    p, rows, experts = problem, problem.rows, problem.experts

    def tensor(*shape: int, dtype: torch.dtype = p.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def index(*shape: int) -> Tensor:
        return tensor(*shape, dtype=torch.int32)

    limit = max_tiles(rows, experts, config.block_m)
    offsets, schedule = index(experts), Schedule(index(limit), index(limit), index(limit), index(1))
    scale = tensor(rows, dtype=torch.float32)
    if p.kernel == "up_swiglu":
        x = tensor(rows if config.separate else p.tokens, p.k)
        w, z, act = tensor(experts, 2 * p.n, p.k), tensor(rows, 2 * p.n), tensor(rows, p.n)
        return up_swiglu_launch(
            x, index(rows), w, offsets, z, act, top_k=rows // p.tokens, config=config, schedule=schedule
        )
    if p.kernel == "dgrad_swiglu" and not config.separate:
        grad, w, z, act = tensor(rows, p.k), tensor(experts, p.k, p.n), tensor(rows, 2 * p.n), tensor(rows, p.n)
        parts = tensor(rows, -(-p.n // config.block_n), dtype=torch.float32)
        return dgrad_swiglu_launch(grad, w, z, scale, offsets, z, act, parts, config=config, schedule=schedule)
    if p.kernel == "wgrad":
        out = tensor(experts, p.n, p.k, dtype=torch.float32 if accumulate else p.dtype)
        grad, x = tensor(rows, p.n), tensor(rows, p.k)
        return wgrad_launch(grad, x, offsets, out, accumulate=accumulate, config=config)
    transposed = p.kernel in ("grouped_mm_dgrad", "dgrad_swiglu")
    weight = tensor(experts, p.k, p.n) if transposed else tensor(experts, p.n, p.k)
    return grouped_mm_launch(
        tensor(rows, p.k),
        weight,
        offsets,
        tensor(rows, p.n),
        transposed=transposed,
        row_weight=scale if row_weight else None,
        config=replace(config, separate=False),
        schedule=schedule,
    )
