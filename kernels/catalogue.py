"""Every kernel's launch at a shape, on meta tensors: what is compiled and inspected without a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from moegraph.kernels.config import default_config
from moegraph.kernels.dgrad_swiglu import dgrad_swiglu_launch
from moegraph.kernels.launch import Launch
from moegraph.kernels.move_rows import combine_launch, permute_launch
from moegraph.kernels.rows_gemm import grouped_mm_launch
from moegraph.kernels.tiles import Schedule, max_tiles
from moegraph.kernels.up_swiglu import up_swiglu_launch
from moegraph.kernels.wgrad import wgrad_launch


def launches(
    *, tokens: int, d_model: int, d_ff: int, num_experts: int, top_k: int, dtype: torch.dtype = torch.bfloat16
) -> Iterator[tuple[str, Launch]]:
    """(name, launch) of each kernel of one mixture-of-experts block, forward and backward."""
    rows = tokens * top_k

    def tensor(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=kind, device="meta")

    def index(*shape: int) -> torch.Tensor:
        return tensor(*shape, kind=torch.int32)

    limit = max_tiles(rows, num_experts, 128)
    schedule = Schedule(index(limit), index(limit), index(1))
    offsets, weight = index(num_experts), tensor(rows, kind=torch.float32)
    x, w_up, w_down = (
        tensor(tokens, d_model),
        tensor(num_experts, 2 * d_ff, d_model),
        tensor(num_experts, d_model, d_ff),
    )
    wide, z, act = tensor(rows, d_model), tensor(rows, 2 * d_ff), tensor(rows, d_ff)
    yield "permute", permute_launch(x, index(rows), offsets, wide, top_k)
    yield "up_swiglu", up_swiglu_launch(x, index(rows), w_up, offsets, z, act, schedule=schedule)
    yield "down", grouped_mm_launch(act, w_down, offsets, wide, row_weight=weight, schedule=schedule)
    yield "combine", combine_launch(wide, index(rows), offsets, x, top_k)
    config = default_config("dgrad_swiglu", dtype, d_ff, d_model)
    parts = tensor(rows, -(-d_ff // config.block_n), kind=torch.float32)
    yield (
        "dgrad_swiglu",
        dgrad_swiglu_launch(wide, w_down, z, weight, offsets, z, act, parts, config=config, schedule=schedule),
    )
    yield "up_dgrad", grouped_mm_launch(z, w_up, offsets, wide, transposed=True, schedule=schedule)
    yield "up_wgrad", wgrad_launch(z, wide, offsets, w_up)
    yield "down_wgrad", wgrad_launch(wide, act, offsets, w_down)
