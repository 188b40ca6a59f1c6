"""The blocks of moegraph that are timed: logits → top-k and softmax over the chosen → sort → experts → combine.

Gradients are those of x, the logits and both weights. `Routed` takes the logits from its own router instead and adds
the router's losses, as the lowering does.

Legend: T tokens, D model width, F expert width, E experts, K top-k, R = T·K.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from moegraph import ops

Cfg = tuple[int, int, int, int, int, float]
BALANCE_COEF = 0.01
Z_COEF = 1e-4


def _experts(x: Tensor, weights: Tensor, ids: Tensor, w_up: Tensor, w_down: Tensor, top_k: int) -> Tensor:
    metadata = ops.sort_by_expert(ids, w_up.shape[0])
    row_weight = ops.gather_weights(weights, *metadata)
    y, _ = ops.expert_ffn(x, *metadata, row_weight, w_up, w_down, top_k=top_k)
    return ops.combine(y, *metadata, top_k=top_k)


def fused(x: Tensor, logits: Tensor, w_up: Tensor, w_down: Tensor, top_k: int) -> Tensor:
    """x [T, D], logits [T, E], w_up [E, 2F, D], w_down [E, D, F] → [T, D]; the experts are one operator."""
    weights, ids = ops.route(logits, None, score="none", top_k=top_k, weight_from="softmax_selected")
    return _experts(x, weights, ids, w_up, w_down, top_k)


def separate(x: Tensor, logits: Tensor, w_up: Tensor, w_down: Tensor, top_k: int) -> Tensor:
    """The same from an operator for each step: gather, product, SwiGLU, product, router weight."""
    weights, ids = ops.route(logits, None, score="none", top_k=top_k, weight_from="softmax_selected")
    metadata = ops.sort_by_expert(ids, w_up.shape[0])
    rows = ops.permute(x, *metadata, top_k=top_k)
    act = ops.swiglu(ops.grouped_mm(rows, w_up, metadata[2]))
    down = ops.grouped_mm(act, w_down, metadata[2])
    weighted = ops.scale_rows(down, ops.gather_weights(weights, *metadata))
    return ops.combine(weighted, *metadata, top_k=top_k)


def routed(
    x: Tensor, w_up: Tensor, w_down: Tensor, w_router: Tensor, bias: Tensor | None, top_k: int
) -> tuple[Tensor, Tensor]:
    """(out [T, D], loss 0-d) with logits x · w_routerᵀ, w_router [E, D]; the loss is balance and z loss, weighted."""
    logits = ops.router_logits(x, w_router, bias)
    weights, ids = ops.route(logits, None, score="softmax", top_k=top_k, norm_kind="sum")
    out = _experts(x, weights, ids, w_up, w_down, top_k)
    balance = ops.balance_micro_batch(logits, ids, None, score="softmax", top_k=top_k)
    return out, BALANCE_COEF * balance + Z_COEF * ops.z_loss(logits, None)


class Block:
    """A block of moegraph, of the protocol that peers follow too (`moegraph.benchmarks.peers`).

    The weights are those given, not copies: nothing here changes them.
    """

    name = ""
    function: Callable[..., Any]

    def __init__(self, *, compiled: bool) -> None:
        function = type(self).function
        self._run = torch.compile(function, fullgraph=True, dynamic=False) if compiled else function

    def setup(self, cfg: Cfg, w_up: Tensor, w_down: Tensor) -> None:
        """Takes the weights w_up [E, 2F, D] and w_down [E, D, F]; `cfg` is (T, D, F, E, K, skew)."""
        self.top_k = cfg[4]
        self.params = [w_up, w_down]

    def fwd(self, x: Tensor, logits: Tensor) -> Any:
        """The output [T, D]."""
        return self._run(x, logits, *self.params, self.top_k)

    def canon(self, grads: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Gradients of `params` → those of w_up and w_down."""
        return grads[0], grads[1]


class Fused(Block):
    """The experts as one operator, `expert_ffn`."""

    name = "moegraph"
    function = staticmethod(fused)


class Separate(Block):
    """The operators that `expert_ffn` stands for."""

    name = "moegraph, separate operators"
    function = staticmethod(separate)


class Routed(Block):
    """`Fused` behind a router with a balance loss and a z loss. `fwd` does not read the logits it is given."""

    name = "moegraph, router and losses"
    function = staticmethod(routed)

    def setup(self, cfg: Cfg, w_up: Tensor, w_down: Tensor) -> None:
        """As `Block`, and makes the router's weight [E, D] and, with skew, its fixed bias [E]."""
        super().setup(cfg, w_up, w_down)
        _, d_model, _, experts, _, skew = cfg
        generator = torch.Generator(w_up.device).manual_seed(2)

        def normal(*size: int) -> Tensor:
            return torch.randn(size, device=w_up.device, generator=generator)

        self.bias = skew * normal(experts) if skew else None
        router = (normal(experts, d_model) * d_model**-0.5).to(w_up.dtype)
        self.params = [*self.params, router.requires_grad_()]

    def fwd(self, x: Tensor, logits: Tensor) -> Any:
        """(out [T, D], loss 0-d)."""
        return self._run(x, *self.params, self.bias, self.top_k)

    def router(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The router's weight [E, D] and its logits [T, E] of x."""
        with torch.no_grad():
            return self.params[2], ops.router_logits(x, self.params[2], self.bias)
