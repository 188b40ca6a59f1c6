"""Root-mean-square normalisation (arXiv 1910.07467), decomposed into functional aten so that Inductor fuses it.

`F.rms_norm` is not used: its trace contains an in-place add and differs between devices.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moegraph.ops.precision import accumulate_dtype


class _RmsNorm(torch.autograd.Function):
    """Saves x, weight and r = rsqrt(mean x² + eps). With h = g·w: dx = r·(h - x·r²·mean(h·x)), dw = Σ g·x·r."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(accumulate_dtype(x.dtype))
        inverse_rms = torch.rsqrt((wide * wide).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, inverse_rms)
        return (wide * inverse_rms * weight.to(wide.dtype)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, inverse_rms = ctx.saved_tensors
        wide = x.to(inverse_rms.dtype)
        grad = grads[0].to(inverse_rms.dtype)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            h = grad * weight.to(inverse_rms.dtype)
            projection = (h * wide).mean(-1, keepdim=True) * (inverse_rms * inverse_rms)
            grad_x = ((h - wide * projection) * inverse_rms).to(x.dtype)
        if ctx.needs_input_grad[1]:
            rows = (grad * (wide * inverse_rms)).reshape(-1, x.shape[-1])
            grad_weight = rows.sum(0).to(weight.dtype)
        return grad_x, grad_weight, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., D] / sqrt(mean over D of x² + eps) · weight [D], in x's dtype.

    Statistics, scaling and weight in float32 (float64 for float64), rounded once at the end. The input and the weight
    gradient are separate nodes.
    """
    return _RmsNorm.apply(x, weight, eps)  # type: ignore[no-any-return, no-untyped-call]
