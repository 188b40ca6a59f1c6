"""A call of every operator on scaled 8-bit operands, for `opcheck`; of its checks only one can compare FP8."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moegraph import ops
from moegraph.ops.mx_linear_wgrad import mx_quantize_tokens
from moegraph.ops.quantize import mx_quantize_ragged_columns
from moegraph.ops.scaled_mm import WGRAD_ALIGN
from tests.kernels.cases import ragged
from tests.kernels.scaled_cases import block_quantised, mx_quantised, quantised, square_quantised, transposed_runs

_mg = torch.ops.moegraph
CHECKS = ("test_faketensor",)


def scaled_calls() -> dict[str, tuple[Any, tuple[Any, ...], tuple[str, ...]]]:
    """name → (operator, arguments, what opcheck can check)."""
    torch.manual_seed(0)
    case, d, f = ragged((3, 0, 5), 2), 64, 128
    offsets, row_weight = case.offsets, torch.rand(case.rows)
    x, z = torch.randn(case.rows, d), torch.randn(case.rows, 2 * f).bfloat16()
    up, down_t, down = torch.randn(3, 2 * f, d), torch.randn(3, f, d), torch.randn(3, d, f)
    runs: list[Tensor] = []
    for width in (d, f):
        data, scale, ends = transposed_runs(torch.randn(8, width), case, WGRAD_ALIGN)
        runs += [data, scale]
    mx_runs: list[Tensor] = []
    for width in (d, f):
        data, scale, mx_ends = mx_quantize_ragged_columns(torch.randn(case.rows, width), offsets)
        mx_runs += [data, scale]
    block_scaled = (*block_quantised(torch.randn(case.rows, f)), *square_quantised(down)[:2])
    bias = torch.randn(3, f).bfloat16()

    def swizzled(x: Tensor) -> tuple[Tensor, Tensor]:
        return ops.mx_quantize_rows(x, offsets if x.dim() == 2 else None, swizzled=True)

    bias, by_block = torch.randn(3, f).bfloat16(), block_scaled[:2]
    found = {
        "fp8_grouped_mm": (*quantised(x), *quantised(down_t), offsets, bias, row_weight),
        "fp8_up_swiglu": (*quantised(x), *quantised(up), offsets),
        "fp8_dgrad_swiglu": (*quantised(x), *quantised(down_t), z, row_weight, offsets),
        "fp8_grouped_mm_wgrad": (*runs, ends),
        "fp8_block_grouped_mm": (*block_scaled, offsets, torch.randn(3, d).bfloat16(), row_weight),
        "fp8_up_swiglu_blocks": (*quantised(x), *quantised(up), offsets),
        "fp8_block_up_swiglu": (*by_block, *square_quantised(torch.randn(3, 2 * f, f))[:2], offsets),
        "fp8_block_dgrad_swiglu": (*by_block, *square_quantised(torch.randn(3, f, f))[:2], z, row_weight, offsets),
        "fp8_block_up_swiglu_quantized": (*by_block, *square_quantised(torch.randn(3, 2 * f, f))[:2], offsets),
        "fp8_block_dgrad_swiglu_quantized": (
            *(*by_block, *square_quantised(torch.randn(3, f, f))[:2]),
            *(z, row_weight, offsets),
        ),
        "fp8_quantize_blocks": (torch.randn(case.rows, f), offsets),
        "swiglu_quantized": (z, offsets, 0.0, 0.0, "mx"),
        "swiglu_kept_quantized": (z, None, 1.7, 0.8, "blocks"),
        "swiglu_backward_quantized": (torch.randn(case.rows, f).bfloat16(), z, offsets, 0.0, 0.0, "fp8"),
        "mx_grouped_mm": (*mx_quantised(x), *mx_quantised(down_t), offsets, bias, row_weight),
        "mx_grouped_mm_wgrad": (*mx_runs, mx_ends),
        "mx_quantize_tokens": (x, True),
        "mx_linear_wgrad": (*mx_quantize_tokens(x, False), *mx_quantize_tokens(z, False)),
        "mx_linear": (*mx_quantised(x), *mx_quantised(down_t[0]), bias[0]),
        "mx_up_swiglu": (*mx_quantised(x), *mx_quantised(up), offsets),
        "mx_up_swiglu_quantized": (*swizzled(x), *swizzled(up), offsets),
        "mx_up_swiglu_saved": (*swizzled(x), *swizzled(up), offsets),
        "mx_dgrad_swiglu_saved": (*swizzled(x), *swizzled(down_t), *ops.mx_quantize(z), row_weight, offsets),
        "mx_dgrad_swiglu_quantized": (*swizzled(x), *swizzled(down_t), z, row_weight, offsets),
        "mx_dgrad_swiglu": (*mx_quantised(x), *mx_quantised(down_t), z, row_weight, offsets),
    }
    return {name: (getattr(_mg, name), arguments, CHECKS) for name, arguments in found.items()}
