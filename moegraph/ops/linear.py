"""Matrix products of the dense part: `linear`, and the router's product in float32.

Legend: T tokens, D model width, N output width, E experts.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moegraph.ops.precision import accumulate_dtype


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, D] · weight [N, D]ᵀ + bias [N] → [T, N], in x's dtype. `F.linear` traces alike on every device."""
    return F.linear(x, weight, bias)


class _RouterLogits(torch.autograd.Function):
    """Saves x and the weight as they came, not their float32 copies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        wide = accumulate_dtype(x.dtype)
        return F.linear(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad = grads[0]
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.mm(grad, weight.to(grad.dtype)).to(x.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = torch.mm(grad.t(), x.to(grad.dtype)).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = grad.sum(0).to(ctx.bias_dtype)
        return grad_x, grad_weight, grad_bias


def router_logits(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Logits [T, E] of x [T, D] with weight [E, D] and bias [E], whatever the model computes in.

    The product is taken in float32 (float64 when x is float64): in bfloat16 nearly tied experts would change places.
    """
    return _RouterLogits.apply(x, weight, bias)  # type: ignore[no-any-return, no-untyped-call]
