"""The launches of a block with experts in MXFP8, on meta tensors: to be compiled and inspected without a GPU.

Products read scales swizzled, so everything is quantised that way: activations and gradients as ragged rows, weights
once per orientation. Weight gradients are in bf16 and not here.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from moegraph.kernels.config import FP8, mx_config
from moegraph.kernels.launch import Launch
from moegraph.kernels.mx_dgrad_swiglu import mx_dgrad_swiglu_launch
from moegraph.kernels.mx_quantize import empty_quantized, mx_quantize_launch
from moegraph.kernels.mx_rows_gemm import mx_grouped_mm_launch
from moegraph.kernels.mx_up_swiglu import mx_up_swiglu_launch
from moegraph.kernels.padded_offsets import padded_offsets_launch
from moegraph.kernels.tiles import Schedule, max_tiles


def mx_layer_launches(*, rows: int, d_model: int, d_ff: int, num_experts: int) -> Iterator[tuple[str, Launch]]:
    """(name, launch) of every MXFP8 kernel of a block, R = `rows` rows sorted by expert, activations bf16."""

    def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    experts = num_experts
    limit = max_tiles(rows, experts, 128)
    offsets, index = tensor(experts, dtype=torch.int32), tensor(limit, dtype=torch.int32)
    schedule = Schedule(index, index, index, tensor(1, dtype=torch.int32))
    x, act, z = tensor(rows, d_model), tensor(rows, d_ff), tensor(rows, 2 * d_ff)
    weight = tensor(rows, dtype=torch.float32)

    def quantized(n: Tensor) -> tuple[str, Launch]:
        ragged = n.dim() == 2
        out = empty_quantized(n, experts if ragged else 0, rows=True, columns=False, swizzled=True)
        given = (offsets, schedule) if ragged else (None, None)
        name = f"quantize {list(n.shape)}"
        return name, mx_quantize_launch(n, out, *given, swizzled=True)

    def scales(of: Tensor, experts: int) -> Tensor:
        """Swizzled scales along the rows of ragged rows, or with no experts of matrices."""
        scale = empty_quantized(of, experts, rows=True, columns=False, swizzled=True).row_scale
        assert scale is not None
        return scale

    def operands(n: int, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        left, right = tensor(rows, k, dtype=FP8), tensor(experts, n, k, dtype=FP8)
        return left, scales(left, experts), right, scales(right, 0)

    wanted = [x, act, z]
    wanted += [tensor(experts, n, k) for n, k in ((2 * d_ff, d_model), (d_model, d_ff))]
    wanted += [tensor(experts, k, n) for n, k in ((2 * d_ff, d_model), (d_model, d_ff))]
    yield from dict(map(quantized, wanted)).items()
    yield "padded_offsets", padded_offsets_launch(offsets, tensor(experts, dtype=torch.int32))
    yield "up_swiglu", mx_up_swiglu_launch(*operands(2 * d_ff, d_model), offsets, z, act, schedule=schedule)
    yield (
        "down",
        mx_grouped_mm_launch(*operands(d_model, d_ff), offsets, x, row_weight=weight, schedule=schedule),
    )
    config = mx_config("dgrad_swiglu", d_ff, d_model)
    rest = (z, weight, offsets, z, act, tensor(rows, -(-d_ff // config.block_n), dtype=torch.float32))
    yield (
        "dgrad_swiglu",
        mx_dgrad_swiglu_launch(*operands(d_ff, d_model), *rest, config=config, schedule=schedule),
    )
    up_dgrad = operands(d_model, 2 * d_ff)
    yield "up_dgrad", mx_grouped_mm_launch(*up_dgrad, offsets, x, row_weight=None, schedule=schedule)
