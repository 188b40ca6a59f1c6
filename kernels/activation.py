"""Gated activations of a pre-activation [gate | up], and their slopes, for epilogues; computed in fp32.

swiglu           a = silu(gate) · up
swiglu_clamped   a = g · σ(alpha · g) · (u + 1),  g = min(gate, limit), u = up clamped to ± limit   (gpt-oss)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Activation(NamedTuple):
    """Which one: SwiGLU where `clamped` is false; `alpha` and `limit` belong to the clamped one."""

    clamped: bool = False
    alpha: float = 1.0
    limit: float = 0.0

    @classmethod
    def of(cls, alpha: float, limit: float) -> Activation:
        """That of an operator's arguments: `limit` 0 is SwiGLU."""
        return cls(limit > 0, alpha, limit)

    def constants(self) -> dict[str, Any]:
        """What a kernel that computes it is compiled with."""
        return {"CLAMPED": self.clamped, "ALPHA": self.alpha, "LIMIT": self.limit}


@triton.jit
def _clamp(x, LIMIT: tl.constexpr, BOTH: tl.constexpr):
    """By comparisons, which NaN falls through, as it does in torch.clamp."""
    x = tl.where(x > LIMIT, LIMIT, x)
    if BOTH:
        x = tl.where(x < -LIMIT, -LIMIT, x)
    return x


@triton.jit
def gated(gate, up, CLAMPED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """The activation of fp32 `gate` and `up`, of one shape."""
    if CLAMPED:
        gate = _clamp(gate, LIMIT, False)
        up = _clamp(up, LIMIT, True) + 1.0
        return gate / (1.0 + tl.exp(-ALPHA * gate)) * up
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def gated_slopes(gate, up, CLAMPED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """(activation, its derivative by gate, its derivative by up); at a limit itself the derivative is the inner one."""
    if CLAMPED:
        free_gate = gate <= LIMIT
        free_up = (up <= LIMIT) & (up >= -LIMIT)
        gate = _clamp(gate, LIMIT, False)
        up = _clamp(up, LIMIT, True) + 1.0
        sigmoid = 1.0 / (1.0 + tl.exp(-ALPHA * gate))
        by_up = gate * sigmoid
        by_gate = up * sigmoid * (1.0 + ALPHA * gate * (1.0 - sigmoid))
        return by_up * up, tl.where(free_gate, by_gate, 0.0), tl.where(free_up, by_up, 0.0)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    by_up = gate * sigmoid
    act = by_up * up
    return act, up * sigmoid + act * (1.0 - sigmoid), by_up


@triton.jit
def gated_gradients(da, gate, up, CLAMPED: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """Gradients by gate and by up of the activation, of which da is the gradient; operations in the order of
    `moegraph.ops.pointwise`."""
    if CLAMPED:
        free_gate = gate <= LIMIT
        free_up = (up <= LIMIT) & (up >= -LIMIT)
        gate = _clamp(gate, LIMIT, False)
        up = _clamp(up, LIMIT, True)
        sigmoid = 1.0 / (1.0 + tl.exp(-ALPHA * gate))
        by_gate = da * (up + 1.0) * (sigmoid * (1.0 + ALPHA * gate * (1.0 - sigmoid)))
        by_up = da * (gate * sigmoid)
        return tl.where(free_gate, by_gate, 0.0), tl.where(free_up, by_up, 0.0)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    return da * up * (sigmoid * (1.0 + gate * (1.0 - sigmoid))), da * (gate * sigmoid)
