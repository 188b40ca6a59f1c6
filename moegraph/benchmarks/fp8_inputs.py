"""FP8 products on a device for the tuner: quantised random inputs, and the kernel that takes a configuration."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from moegraph.kernels.config import FP8
from moegraph.kernels.shapes import Problem

_LARGEST = 448.0


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., K] → FP8 data and fp32 scales [...], one per row, rounded to nearest."""
    scale = x.abs().amax(-1).float().clamp_min(1e-12) / _LARGEST
    return (x / scale[..., None]).clamp_(-_LARGEST, _LARGEST).to(FP8), scale


def fp8_function(
    problem: Problem, normal: Callable[..., Tensor], row_weight: Tensor, offsets: Tensor
) -> Callable[..., Tensor | tuple[Tensor, ...]]:
    """The kernel of an FP8 problem on inputs: `normal(*shape, scale)` in bf16, row_weight [R] fp32, offsets [E]."""
    from moegraph.kernels import fp8_dgrad_swiglu, fp8_rows_gemm, fp8_up_swiglu, fp8_wgrad

    p, device = problem, offsets.device
    if p.kernel == "wgrad":
        padded = fp8_wgrad.padded_rows(p.rows, p.experts)
        scales = [torch.full((p.experts, width), 1 / _LARGEST, device=device) for width in (p.n, p.k)]
        grad_t, rows_t = (quantised(normal(width, padded))[0] for width in (p.n, p.k))
        ends = _padded_ends(offsets, fp8_wgrad.ALIGN)
        return partial(fp8_wgrad.fp8_wgrad, grad_t, scales[0], rows_t, scales[1], ends)
    columns = 2 * p.n if p.kernel == "up_swiglu" else p.n
    weight = torch.empty(p.experts, columns, p.k, dtype=FP8, device=device)
    weight_scale = torch.empty(p.experts, columns, device=device)
    for expert in range(p.experts):
        data, weight_scale[expert] = quantised(normal(columns, p.k, scale=p.k**-0.5))
        weight[expert].copy_(data)
    rows, row_scale = quantised(normal(p.rows, p.k))
    if p.kernel == "dgrad_swiglu":
        z = normal(p.rows, 2 * p.n)
        kernel = fp8_dgrad_swiglu.fp8_dgrad_swiglu
        return partial(kernel, rows, row_scale, weight, weight_scale, z, row_weight, offsets)
    if p.kernel == "up_swiglu":
        return partial(fp8_up_swiglu.fp8_up_swiglu, rows, row_scale, weight, weight_scale, offsets)
    return partial(fp8_rows_gemm.fp8_grouped_mm, rows, row_scale, weight, weight_scale, offsets)


def _padded_ends(offsets: Tensor, align: int) -> Tensor:
    """The ends [E] int32 of the experts' runs, each padded to a multiple of `align`."""
    sizes = torch.diff(offsets, prepend=offsets.new_zeros(1))
    return ((sizes + align - 1) // align * align).cumsum(0).to(torch.int32)
