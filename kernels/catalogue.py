"""Every kernel's launch at a shape, on meta tensors: what is compiled and inspected without a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from moegraph.kernels.bias_grad import bias_grad_launch, num_parts
from moegraph.kernels.chips import Card
from moegraph.kernels.gated_backward import gated_backward_launch
from moegraph.kernels.launch import Launch
from moegraph.kernels.move_rows import combine_launch, move_weights_launch, permute_launch
from moegraph.kernels.products import product_launch
from moegraph.kernels.shapes import block_problems
from moegraph.kernels.sort_rows import count_launch, default_block, place_launch, scan_launch
from moegraph.kernels.tiles import Schedule, max_tiles, tile_schedule_launch
from moegraph.kernels.top_k import top_k_launch
from moegraph.kernels.tuning import choose_for


def launches(
    *,
    tokens: int,
    d_model: int,
    d_ff: int,
    num_experts: int,
    top_k: int,
    dtype: torch.dtype = torch.bfloat16,
    card: Card | None = None,
) -> Iterator[tuple[str, Launch]]:
    """(name, launch) of each kernel of one mixture-of-experts block, forward and backward, its products with the
    configurations that a card gets (None: those of the rule for sm_90)."""
    rows = tokens * top_k

    def tensor(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=kind, device="meta")

    def index(*shape: int) -> torch.Tensor:
        return tensor(*shape, kind=torch.int32)

    offsets, x, wide, z = index(num_experts), tensor(tokens, d_model), tensor(rows, d_model), tensor(rows, 2 * d_ff)
    ids, block = index(tokens, top_k), default_block(num_experts)
    ends = index(num_experts + 1, -(-rows // block.block_m))
    yield "top_k", top_k_launch(tensor(tokens, num_experts, kind=torch.float32), ids)
    yield "sort_count", count_launch(ids, offsets, ends, block)
    yield "sort_scan", scan_launch(ends)
    yield "sort_place", place_launch(ids, ends, index(rows), index(rows), offsets, block)
    limit = max_tiles(rows, num_experts, 128)
    yield (
        "tile_schedule",
        tile_schedule_launch(offsets, rows, 128, Schedule(index(limit), index(limit), index(limit), index(1))),
    )
    yield "permute", permute_launch(x, index(rows), offsets, wide, top_k)
    yield "combine", combine_launch(wide, index(rows), offsets, x, top_k)
    sums = tensor(num_parts(rows, num_experts), num_experts, 2 * d_ff, kind=torch.float32)
    yield "up_bias_grad", bias_grad_launch(z, offsets, sums)
    act, weight = tensor(rows, d_ff), tensor(rows, kind=torch.float32)
    yield "router_weights", move_weights_launch(weight, index(rows), offsets, weight)
    yield "gated_backward", gated_backward_launch(act, z, weight, offsets, z, act, weight)
    sizes = {"tokens": tokens, "d_model": d_model, "d_ff": d_ff, "num_experts": num_experts, "top_k": top_k}
    for name, problem in block_problems(**sizes, dtype=dtype).items():
        choice = choose_for(problem, card or torch.device("meta"))
        yield name, product_launch(problem, choice.config, row_weight=name == "down")
