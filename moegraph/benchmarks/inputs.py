"""Random weights and inputs of one block, the same for everything that is compared."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moegraph.benchmarks.shapes import Shape

_GAP = 1e-3


class Inputs(NamedTuple):
    """x [T, D], router logits [T, E] float32 and the gradient of the output [T, D]; x and logits want gradients."""

    x: Tensor
    logits: Tensor
    grad: Tensor

    def first(self, tokens: int) -> Inputs:
        """Copies of the first tokens' rows."""
        x, logits, grad = (t.detach()[:tokens].clone() for t in self)
        return Inputs(x.requires_grad_(), logits.requires_grad_(), grad)


def make_weights(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int = 0) -> tuple[Tensor, Tensor]:
    """w_up [E, 2F, D], gate rows first, and w_down [E, D, F]; normal, scaled so that products keep the variance."""
    generator = torch.Generator(device).manual_seed(seed)
    _, d_model, d_ff, experts, _, _ = shape.cfg

    def normal(*size: int) -> Tensor:
        weight = torch.randn(size, dtype=dtype, device=device, generator=generator)
        return weight.mul_(size[-1] ** -0.5).requires_grad_()

    return normal(experts, 2 * d_ff, d_model), normal(experts, d_model, d_ff)


def make_inputs(shape: Shape, dtype: torch.dtype, device: torch.device, sets: int = 3, seed: int = 1) -> list[Inputs]:
    """`sets` independent input sets.

    A token whose last chosen and first refused logits are closer than 0.001 has its chosen ones raised by 0.01, so that
    no rounding and no rule for ties decides a choice and errors compare arithmetic.
    """
    generator = torch.Generator(device).manual_seed(seed)
    tokens, d_model, _, experts, top_k, skew = shape.cfg
    bias = torch.randn(experts, device=device, generator=generator) * skew

    def normal() -> Tensor:
        return torch.randn(tokens, d_model, dtype=dtype, device=device, generator=generator)

    found = []
    for _ in range(sets):
        x = normal().requires_grad_()
        logits = torch.randn(tokens, experts, device=device, generator=generator) + bias
        if top_k < experts:
            best, ids = logits.topk(top_k + 1, dim=-1)
            close = (best[:, top_k - 1] - best[:, top_k] < _GAP).float()
            logits.scatter_add_(1, ids[:, :top_k], 10 * _GAP * close[:, None].expand(-1, top_k))
        found.append(Inputs(x, logits.requires_grad_(), normal()))
    return found


def experts_with_rows(shape: Shape, inputs: list[Inputs]) -> float:
    """How many experts are chosen at least once, the mean over the input sets."""
    used = 0
    for each in inputs:
        counts = torch.bincount(each.logits.topk(shape.top_k, dim=-1).indices.reshape(-1), minlength=shape.experts)
        used += int((counts > 0).sum())
    return used / len(inputs)
