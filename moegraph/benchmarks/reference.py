"""The block in float64, expert by expert, from formulas of its own: what errors are measured against.

No operator of moegraph and no autograd takes part, except for the router's two losses. One expert's float64 weights,
rows and weight gradients are alive at a time; beside them only float64 output and input gradient.

Legend: T tokens, D model width, F expert width, E experts, K top-k.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moegraph import ops
from moegraph.benchmarks.blocks import BALANCE_COEF, Z_COEF
from moegraph.benchmarks.inputs import Inputs
from moegraph.benchmarks.shapes import Shape

TILE = 128
_CHUNK = 32 * TILE  # rows compared at a time


class Result(NamedTuple):
    """What a block computed: out and dx [T, D], d_router, d_up [E, 2F, D] and d_down [E, D, F].

    d_router is the gradient of the logits [T, E], or, for a block with its own router, of the router's weight [E, D].
    A block without backward has no gradients.
    """

    out: Tensor
    dx: Tensor | None = None
    d_router: Tensor | None = None
    d_up: Tensor | None = None
    d_down: Tensor | None = None


@dataclass(frozen=True)
class Errors:
    """Against float64, by value: ‖have - want‖ / ‖want‖, and the largest of the same over tiles of 128 × 128."""

    relative: dict[str, float]
    worst_tile: dict[str, float]

    @property
    def largest(self) -> float:
        """The largest relative error of a whole value; NaN if one is."""
        return max(self.relative.values(), key=lambda value: math.inf if math.isnan(value) else value)


class Difference:
    """Sums of squares of have - want and of want, over pieces of one value."""

    def __init__(self) -> None:
        self._sums: Tensor | None = None
        self._tile: Tensor | None = None

    def add(self, have: Tensor, want: Tensor) -> None:
        """Two matrices of one shape. Raises ValueError if they are not."""
        if have.shape != want.shape:
            raise ValueError(f"a value of shape {list(have.shape)} where {list(want.shape)} is right")
        for start in range(0, want.shape[0], _CHUNK):
            right = want[start : start + _CHUNK].double()
            wrong = (have[start : start + _CHUNK].double() - right).square_()
            tiles = torch.stack([_tile_sums(wrong), _tile_sums(right.square_())])
            sums = tiles.sum((1, 2))
            tile = torch.where(tiles[0] == 0, 0.0, tiles[0] / tiles[1]).amax()  # inf where zeros were right
            self._sums = sums if self._sums is None else self._sums + sums
            self._tile = tile if self._tile is None else torch.maximum(self._tile, tile)

    def relative(self) -> float:
        """‖have - want‖ / ‖want‖; 0 where both are zero."""
        wrong, right = (0.0, 0.0) if self._sums is None else self._sums.tolist()
        return 0.0 if wrong == 0 else math.sqrt(wrong / right) if right else math.inf

    def worst_tile(self) -> float:
        """The same for the worst tile."""
        return 0.0 if self._tile is None else math.sqrt(float(self._tile))


def _tile_sums(squares: Tensor) -> Tensor:
    rows, columns = squares.shape
    padded = F.pad(squares, (0, -columns % TILE, 0, -rows % TILE))
    return padded.reshape(padded.shape[0] // TILE, TILE, -1, TILE).sum((1, 3))


def reference_bytes(shape: Shape, element: int) -> int:
    """About what `measure_errors` needs at most beside weights and inputs, with the block's own run."""
    tokens, d_model, d_ff, experts, _, _ = shape.cfg
    rows = min(tokens, 4 * math.ceil(shape.rows / experts))
    wide = 8 * (2 * tokens * d_model + rows * (4 * d_model + 9 * d_ff) + 6 * d_model * d_ff)
    run = element * (shape.rows * (5 * d_ff + 2 * d_model) + 9 * experts * d_model * d_ff)
    return wide + run


def measure_errors(
    have: Result, inputs: Inputs, w_up: Tensor, w_down: Tensor, top_k: int, router: tuple[Tensor, Tensor] | None = None
) -> Errors:
    """Errors of a block's result on these inputs and weights w_up [E, 2F, D], w_down [E, D, F].

    `router`: (weight [E, D], logits [T, E]) of a block that makes its own logits and adds the router's losses.
    """
    logits = (inputs.logits if router is None else router[1]).detach().double()
    best, ids = logits.topk(top_k, dim=-1)
    weights = torch.softmax(best, -1)
    out = torch.zeros(inputs.x.shape, dtype=torch.float64, device=logits.device)
    dx, d_weights = torch.zeros_like(out), torch.zeros_like(weights)
    names = ("out", "dx", "dlogits" if router is None else "dw_router", "dw_up", "dw_down")
    found = {name: Difference() for name, value in zip(names, have, strict=True) if value is not None}
    for expert in range(w_up.shape[0]):
        token, slot = torch.nonzero(ids == expert, as_tuple=True)
        x, grad = inputs.x.detach()[token].double(), inputs.grad[token].double()
        up, down, weight = w_up.detach()[expert].double(), w_down.detach()[expert].double(), weights[token, slot, None]
        gate, linear = (x @ up.t()).chunk(2, -1)
        sigmoid = torch.sigmoid(gate)
        act = gate * sigmoid * linear
        y = act @ down.t()
        out.index_add_(0, token, weight * y)
        if have.dx is None or have.d_up is None or have.d_down is None:
            continue
        d_weights[token, slot] = (grad * y).sum(-1)
        d_act = (weight * grad) @ down
        dz = torch.cat([d_act * linear * sigmoid * (1 + gate * (1 - sigmoid)), d_act * gate * sigmoid], -1)
        dx.index_add_(0, token, dz @ up)
        found["dw_up"].add(have.d_up[expert], dz.t() @ x)
        found["dw_down"].add(have.d_down[expert], (weight * grad).t() @ act)
    found["out"].add(have.out, out)
    if have.dx is not None and have.d_router is not None:
        chosen = weights * (d_weights - (weights * d_weights).sum(-1, keepdim=True))
        d_router = torch.zeros_like(logits).scatter_(1, ids, chosen)
        if router is not None:
            d_router += _loss_gradient(logits, ids, top_k)
            dx += d_router @ router[0].detach().double()
            d_router = d_router.t() @ inputs.x.detach().double()
        found["dx"].add(have.dx, dx)
        found[names[2]].add(have.d_router, d_router)
    by_name = {name: each.relative() for name, each in found.items()}
    return Errors(by_name, {name: each.worst_tile() for name, each in found.items()})


def _loss_gradient(logits: Tensor, ids: Tensor, top_k: int) -> Tensor:
    leaf = logits.clone().requires_grad_()
    balance = ops.balance_micro_batch(leaf, ids.int(), None, score="softmax", top_k=top_k)
    loss = BALANCE_COEF * balance + Z_COEF * ops.z_loss(leaf, None)
    return torch.autograd.grad(loss, leaf)[0]


def largest_difference(have: Result, base: Result) -> float:
    """The largest ‖have - base‖ / ‖base‖ over the values that both have."""
    largest = 0.0
    for mine, other in zip(have, base, strict=True):
        if mine is None or other is None:
            continue
        difference = Difference()
        difference.add(mine.detach().reshape(-1, mine.shape[-1]), other.detach().reshape(-1, other.shape[-1]))
        value = difference.relative()
        largest = value if math.isnan(value) else max(largest, value)
    return largest
