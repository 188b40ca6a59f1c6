"""Pointwise operators of the layer graph, in plain functional aten so that Inductor fuses them.

Where autograd's own formula would keep float32 copies alive until backward, a `torch.autograd.Function` states which
tensors are saved and the backward in aten; tracing sees through it.

Legend: T tokens, D model width, F expert width, R routed rows = T·K, B sequences, S sequence length, H heads.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moegraph.ops.precision import accumulate_dtype


def add(x: Tensor, y: Tensor, *, alpha: float = 1.0) -> Tensor:
    """x + alpha · y, both of one shape and dtype; the residual stream is made of these."""
    return x + y if alpha == 1.0 else torch.add(x, y, alpha=alpha)


def scale(x: Tensor, factor: float) -> Tensor:
    """x · factor for a constant of the spec (embedding, residual and logit scales)."""
    return x * factor


def sigmoid(x: Tensor) -> Tensor:
    """Logistic function, for the gate of shared experts."""
    return torch.sigmoid(x)


def split_heads(x: Tensor, sequences: int, seq_len: int, num_heads: int) -> Tensor:
    """[T, H·Dh] → [B, S, H, Dh] with T = sequences · seq_len."""
    return x.reshape(sequences, seq_len, num_heads, x.shape[-1] // num_heads)


def merge_heads(x: Tensor) -> Tensor:
    """[B, S, H, Dh] → [T, H·Dh]; the inverse of `split_heads`."""
    sequences, seq_len, num_heads, head_dim = x.shape
    return x.reshape(sequences * seq_len, num_heads * head_dim)


class _Swiglu(torch.autograd.Function):
    """Saves z only. With g = dL/da: d up = g·silu(gate), d gate = g·up·σ(gate)·(1 + gate·(1 - σ(gate)))."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        ctx.save_for_backward(z)
        gate, up = z.to(accumulate_dtype(z.dtype)).chunk(2, dim=-1)
        return (F.silu(gate) * up).to(z.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (z,) = ctx.saved_tensors
        return swiglu_backward(grads[0], z)


def swiglu_backward(grad: Tensor, z: Tensor) -> Tensor:
    """The gradient of z [R, 2F] where `grad` [R, F] is that of `swiglu`, rounded once."""
    wide = accumulate_dtype(z.dtype)
    gate, up = z.to(wide).chunk(2, dim=-1)
    grad = grad.to(wide)
    sigma = torch.sigmoid(gate)
    grad_gate = grad * up * (sigma * (1.0 + gate * (1.0 - sigma)))
    grad_up = grad * (gate * sigma)
    return torch.cat((grad_gate, grad_up), dim=-1).to(z.dtype)


def swiglu(z: Tensor) -> Tensor:
    """silu(z[:, :F]) · z[:, F:], gate half first: [R, 2F] → [R, F] (arXiv 2002.05202).

    Computed in float32 (float64 for float64) and rounded once.
    """
    if z.shape[-1] % 2:
        raise ValueError(f"swiglu needs an even last dimension (gate and up halves), got {z.shape[-1]}")
    return _Swiglu.apply(z)  # type: ignore[no-any-return, no-untyped-call]


class _SwigluClamped(torch.autograd.Function):
    """Saves z only. With g = dL/da and σ = σ(α·gate): d up = g·gate·σ, d gate = g·(up + 1)·σ·(1 + α·gate·(1 - σ)),
    each zero where its half was clamped (at the limit itself it is not, as with `torch.clamp`)."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, alpha: float, limit: float) -> Tensor:
        ctx.save_for_backward(z)
        ctx.alpha, ctx.limit = alpha, limit
        gate, up = z.to(accumulate_dtype(z.dtype)).chunk(2, dim=-1)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return ((up + 1.0) * (gate * torch.sigmoid(alpha * gate))).to(z.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (z,) = ctx.saved_tensors
        return swiglu_clamped_backward(grads[0], z, ctx.alpha, ctx.limit), None, None


def swiglu_clamped_backward(grad: Tensor, z: Tensor, alpha: float, limit: float) -> Tensor:
    """The gradient of z [R, 2F] where `grad` [R, F] is that of `swiglu_clamped`, rounded once."""
    wide = accumulate_dtype(z.dtype)
    free_gate, free_up = z.to(wide).chunk(2, dim=-1)
    gate, up = free_gate.clamp(max=limit), free_up.clamp(-limit, limit)
    grad = grad.to(wide)
    sigma = torch.sigmoid(alpha * gate)
    grad_gate = grad * (up + 1.0) * (sigma * (1.0 + alpha * gate * (1.0 - sigma)))
    grad_up = grad * (gate * sigma)
    grad_gate = torch.where(free_gate <= limit, grad_gate, 0.0)
    grad_up = torch.where(free_up.abs() <= limit, grad_up, 0.0)
    return torch.cat((grad_gate, grad_up), dim=-1).to(z.dtype)


def swiglu_clamped(z: Tensor, *, alpha: float, limit: float) -> Tensor:
    """The gated activation of gpt-oss (arXiv 2508.10925), gate half first: z [R, 2F] → [R, F].

    (up + 1) · gate · σ(alpha · gate) with gate = min(z[:, :F], limit) and up = z[:, F:] clamped to ±limit. Computed in
    float32 (float64 for float64) and rounded once. A row of zeros stays one.
    """
    if z.shape[-1] % 2:
        raise ValueError(f"swiglu_clamped needs an even last dimension (gate and up halves), got {z.shape[-1]}")
    return _SwigluClamped.apply(z, alpha, limit)  # type: ignore[no-any-return, no-untyped-call]


class _ScaleRows(torch.autograd.Function):
    """Saves y and the weights; dy = g·w, dw = Σ_D g·y, the sum in the wide dtype."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, row_weight: Tensor) -> Tensor:
        ctx.save_for_backward(y, row_weight)
        wide = accumulate_dtype(y.dtype)
        return (y.to(wide) * row_weight.to(wide).reshape(-1, 1)).to(y.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        y, row_weight = ctx.saved_tensors
        wide = accumulate_dtype(y.dtype)
        grad = grads[0].to(wide)
        grad_y = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_y = (grad * row_weight.to(wide).reshape(-1, 1)).to(y.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = (grad * y.to(wide)).sum(-1).to(row_weight.dtype).reshape(row_weight.shape)
        return grad_y, grad_weight


def scale_rows(y: Tensor, row_weight: Tensor) -> Tensor:
    """Row r of y [R, D] times row_weight[r]; row_weight is [R] or [R, 1], of any floating dtype.

    Computed in float32 (float64 for float64) and rounded once to y's dtype. Router weights and the shared experts'
    gate are applied with it.
    """
    return _ScaleRows.apply(y, row_weight)  # type: ignore[no-any-return, no-untyped-call]
