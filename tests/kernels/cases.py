"""Ragged problems for kernel tests: rows sorted by expert, with every awkward group size."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Ragged:
    """`sizes[e]` rows of expert e, then `tail` rows that do not exist; K rows per token where tokens matter."""

    sizes: tuple[int, ...]
    tail: int
    offsets: Tensor
    expert_of_row: Tensor

    @property
    def rows(self) -> int:
        return sum(self.sizes) + self.tail


def ragged(sizes: tuple[int, ...], tail: int = 0, device: str = "cpu") -> Ragged:
    offsets = torch.tensor(sizes).cumsum(0).to(torch.int32).to(device)
    expert = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)).to(device)
    return Ragged(sizes, tail, offsets, expert)


def routed(tokens: int, experts: int, top_k: int, seed: int = 0, device: str = "cpu") -> tuple[Tensor, ...]:
    """(order, inverse, offsets) int32 of a random choice of experts, as `sort_by_expert` gives them."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, experts, generator=generator).topk(top_k, -1).indices.reshape(-1)
    key, order = torch.sort(ids, stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0])
    offsets = torch.searchsorted(key, torch.arange(experts), right=True)
    return tuple(t.to(torch.int32).to(device) for t in (order, inverse, offsets))


def relative_error(have: Tensor, want: Tensor) -> float:
    return float((have.double() - want.double()).norm() / want.double().norm().clamp_min(1e-300))
