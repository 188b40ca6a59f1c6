"""AdamW for one flat piece of the parameters, in one pass over memory.

    g ← factor · g     m ← β1 m + (1 - β1) g     v ← β2 v + (1 - β2) g²
    w ← (1 - r d) w - r / (1 - β1ᵗ) · m / (sqrt(v) / sqrt(1 - β2ᵗ) + eps)     copy ← w, rounded

Gradients are clipped by `factor` as they are read, and the weight that the graphs read is written in the same pass:
30 bytes an element with a bf16 copy, for fp32 masters and moments, where torch's fused AdamW with clipping before and a
copy after moves 42. The gradient is left as it is. Arithmetic is fp32; every element's is its own.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moegraph.kernels.config import Config
from moegraph.kernels.launch import Launch

_BLOCK = 2048
_CONFIG = Config(num_warps=8)


@triton.jit
def adamw_kernel(
    weight_ptr,
    grad_ptr,
    exp_avg_ptr,
    exp_avg_sq_ptr,
    copy_ptr,
    count,
    factor,
    beta1,
    beta2,
    decay,
    rate,
    root,
    eps,
    COPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block of elements per program. decay = 1 - r d, rate = r / (1 - β1ᵗ), root = 1 / sqrt(1 - β2ᵗ)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < count
    g = tl.load(grad_ptr + at, mask=live, other=0.0).to(tl.float32) * factor
    m = tl.load(exp_avg_ptr + at, mask=live, other=0.0).to(tl.float32)
    v = tl.load(exp_avg_sq_ptr + at, mask=live, other=0.0).to(tl.float32)
    w = tl.load(weight_ptr + at, mask=live, other=0.0)
    m = beta1 * m + (1.0 - beta1) * g
    v = beta2 * v + (1.0 - beta2) * g * g
    w = decay * w - rate * m / (tl.sqrt_rn(v) * root + eps)
    tl.store(exp_avg_ptr + at, m.to(exp_avg_ptr.dtype.element_ty), mask=live)
    tl.store(exp_avg_sq_ptr + at, v.to(exp_avg_sq_ptr.dtype.element_ty), mask=live)
    tl.store(weight_ptr + at, w, mask=live)
    if COPY:
        tl.store(copy_ptr + at, w.to(copy_ptr.dtype.element_ty), mask=live)


def adamw_launch(
    weight: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    copy: Tensor | None,
    *,
    factor: float,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
) -> Launch:
    """The launch of `adamw`."""
    return Launch(
        adamw_kernel,
        (triton.cdiv(weight.numel(), _BLOCK),),
        {
            "weight_ptr": weight,
            "grad_ptr": grad,
            "exp_avg_ptr": exp_avg,
            "exp_avg_sq_ptr": exp_avg_sq,
            "copy_ptr": copy if copy is not None else weight,
            "count": weight.numel(),
            "factor": float(factor),
            "beta1": float(beta1),
            "beta2": float(beta2),
            "decay": 1.0 - lr * weight_decay,
            "rate": lr / (1.0 - beta1**step),
            "root": 1.0 / math.sqrt(1.0 - beta2**step),
            "eps": float(eps),
        },
        {"COPY": copy is not None, "BLOCK": _BLOCK},
        _CONFIG,
    )


def adamw(
    weight: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, copy: Tensor | None, **options: Any
) -> None:
    """One step in place: weight [N] fp32, grad [N] fp32, moments [N] fp32 or bf16, copy [N] of any float dtype or None.

    `options` are those of `adamw_launch`; `step` counts from 1. All contiguous, of any shape of N elements.
    """
    if weight.numel():
        adamw_launch(weight, grad, exp_avg, exp_avg_sq, copy, **options).run()


def adamw_reference(
    weight: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    copy: Tensor | None,
    *,
    factor: float,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
) -> None:
    """The same in plain torch, in float64 inside."""
    g, m, v, w = (t.double() for t in (grad, exp_avg, exp_avg_sq, weight))
    g = g * factor
    m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
    w = w * (1 - lr * weight_decay) - lr / (1 - beta1**step) * m / (v.sqrt() / math.sqrt(1 - beta2**step) + eps)
    for target, value in ((exp_avg, m), (exp_avg_sq, v), (weight, w)):
        target.copy_(value.to(target.dtype))
    if copy is not None:
        copy.copy_(w.to(torch.float32))
