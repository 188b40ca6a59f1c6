"""The launch of one FP8 product, on meta tensors: to be compiled and inspected without a GPU.

An input gradient is a plain product, with a weight of its own; as in `products.py`, this is the product in front of an
epilogue that runs as a kernel of its own.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from moegraph.kernels.config import FP8, Config
from moegraph.kernels.fp8_dgrad_swiglu import fp8_dgrad_swiglu_launch
from moegraph.kernels.fp8_rows_gemm import fp8_grouped_mm_launch
from moegraph.kernels.fp8_up_swiglu import fp8_up_swiglu_launch
from moegraph.kernels.fp8_wgrad import fp8_wgrad_launch, padded_rows
from moegraph.kernels.launch import Launch
from moegraph.kernels.shapes import Problem
from moegraph.kernels.tiles import Schedule, max_tiles


def fp8_product_launch(problem: Problem, config: Config, *, row_weight: bool = False, exact: bool = False) -> Launch:
    """The launch of an FP8 problem with a configuration. `row_weight`: the rows of the result are scaled."""
    p, rows, experts = problem, problem.rows, problem.experts

    def tensor(*shape: int, dtype: torch.dtype = FP8) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def scale(*shape: int) -> Tensor:
        return tensor(*shape, dtype=torch.float32)

    def wide(*shape: int) -> Tensor:
        return tensor(*shape, dtype=torch.bfloat16)

    def index(*shape: int) -> Tensor:
        return tensor(*shape, dtype=torch.int32)

    limit = max_tiles(rows, experts, config.block_m)
    offsets, schedule = index(experts), Schedule(index(limit), index(limit), index(limit), index(1))
    if p.kernel == "wgrad":
        padded = padded_rows(rows, experts)
        operands = (tensor(p.n, padded), scale(experts, p.n), tensor(p.k, padded), scale(experts, p.k))
        return fp8_wgrad_launch(*operands, offsets, wide(experts, p.n, p.k), exact=exact, config=config)
    columns = 2 * p.n if p.kernel == "up_swiglu" else p.n
    operands = (tensor(rows, p.k), scale(rows), tensor(experts, columns, p.k), scale(experts, columns))
    if p.kernel == "up_swiglu":
        results = (wide(rows, 2 * p.n), wide(rows, p.n))
        return fp8_up_swiglu_launch(*operands, offsets, *results, exact=exact, config=config, schedule=schedule)
    if p.kernel == "dgrad_swiglu" and not config.separate:
        z, act, parts = wide(rows, 2 * p.n), wide(rows, p.n), scale(rows, -(-p.n // config.block_n))
        rest = (z, scale(rows), offsets, z, act, parts)
        return fp8_dgrad_swiglu_launch(*operands, *rest, exact=exact, config=config, schedule=schedule)
    return fp8_grouped_mm_launch(
        *operands,
        offsets,
        wide(rows, p.n),
        row_weight=scale(rows) if row_weight else None,
        exact=exact,
        config=replace(config, separate=False),
        schedule=schedule,
    )
