"""The launches of a block with experts in MXFP8, on meta tensors: to be compiled and inspected without a GPU.

It is the graph that `cast-mxfp8` and `fold-casts` make of fused experts: tokens and the gradient of the output are
quantised on their way to the experts, the activation and dz by the products that make them, weights once per
orientation. All scales are swizzled. Weight gradients in MXFP8 are `mx_wgrad`'s.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from moegraph.kernels.config import FP8, mx_config
from moegraph.kernels.launch import Launch
from moegraph.kernels.mx_dgrad_swiglu import mx_dgrad_swiglu_launch
from moegraph.kernels.mx_quantize import empty_quantized, empty_swizzled, mx_quantize_launch
from moegraph.kernels.mx_rows_gemm import mx_grouped_mm_launch
from moegraph.kernels.mx_up_swiglu import mx_up_swiglu_launch
from moegraph.kernels.permute_quantize import mx_permute_quantize_launch
from moegraph.kernels.tiles import Schedule, max_tiles


def mx_layer_launches(
    *, tokens: int, top_k: int, d_model: int, d_ff: int, num_experts: int
) -> Iterator[tuple[str, Launch]]:
    """(name, launch) of every MXFP8 kernel of a block with T = `tokens`, activations bf16."""

    def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    rows, experts = tokens * top_k, num_experts
    limit = max_tiles(rows, experts, 128)
    offsets, index = tensor(experts, dtype=torch.int32), tensor(limit, dtype=torch.int32)
    schedule = Schedule(index, index, index, tensor(1, dtype=torch.int32))
    y, act, z = tensor(rows, d_model), tensor(rows, d_ff), tensor(rows, 2 * d_ff)
    weight = tensor(rows, dtype=torch.float32)

    def operands(n: int, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        matrices = tensor(experts, n, k, dtype=FP8)
        scale = empty_quantized(matrices, 0, rows=True, columns=False, swizzled=True).row_scale
        assert scale is not None
        return *empty_swizzled(y, rows, k, experts), matrices, scale

    inverse = tensor(rows, dtype=torch.int32)
    moved = (tensor(tokens, d_model), inverse, offsets, *empty_swizzled(y, rows, d_model, experts))
    yield "permute_quantize", mx_permute_quantize_launch(*moved, top_k, swizzled=True)
    for n, k in ((2 * d_ff, d_model), (d_model, d_ff)):
        for shape in ((n, k), (k, n)):
            wide = tensor(experts, *shape)
            out = empty_quantized(wide, 0, rows=True, columns=False, swizzled=True)
            yield f"quantize {list(wide.shape)}", mx_quantize_launch(wide, out, None, None, swizzled=True)
    quantized = empty_swizzled(y, rows, d_ff, experts)
    yield "up_swiglu", mx_up_swiglu_launch(*operands(2 * d_ff, d_model), offsets, z, *quantized, schedule=schedule)
    yield "down", mx_grouped_mm_launch(*operands(d_model, d_ff), offsets, y, row_weight=weight, schedule=schedule)
    config = mx_config("dgrad_swiglu_quantized", d_ff, d_model)
    parts = tensor(rows, -(-d_ff // config.block_n), dtype=torch.float32)
    gradient = mx_dgrad_swiglu_launch(
        *operands(d_ff, d_model),
        *(z, weight, offsets, z, act, parts),
        dz_quantized=empty_swizzled(y, rows, 2 * d_ff, experts),
        config=config,
        schedule=schedule,
    )
    yield "dgrad_swiglu", gradient
    up_dgrad = operands(d_model, 2 * d_ff)
    yield "up_dgrad", mx_grouped_mm_launch(*up_dgrad, offsets, y, row_weight=None, schedule=schedule)
