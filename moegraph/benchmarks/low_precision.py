"""The block with experts in FP8, as a plain composition of operators, to be timed beside the one in bf16.

    x quantised and gathered in one kernel, up projection + SwiGLU
    quantise a, down projection, router weight, combine
    the output's gradient quantised and gathered, gradient through down projection and SwiGLU
    quantise dz, gradient through the up projection, combine
    weight gradients: in bf16 from gathered bf16 rows (`Fp8`), or of four operands quantised along the experts'
    columns, transposed (`Fp8Wgrad`): their scales need rows in expert order, so those are gathered in bf16 as well

This is the graph that `cast-fp8` and `fold-casts` make of fused experts.

Weights are quantised when the block is set up, as an optimizer would once per step, both along the contraction of the
forward product and along that of the input gradient. Nothing is compiled by torch. FP8 as in `ops.fp8_format`.

Legend: T tokens, D model width, F expert width, E experts, R = T · top-k rows sorted by expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moegraph import ops
from moegraph.benchmarks.blocks import Block, Cfg
from moegraph.benchmarks.inputs import Inputs
from moegraph.ops import scaled_mm
from moegraph.ops.grouped_mm import grouped_mm_wgrad
from moegraph.ops.permute import permute_rows, sum_rows

Metadata = tuple[Tensor, Tensor, Tensor]


class Weights(NamedTuple):
    """FP8 data with the contraction last and fp32 scales, one per row of it: up [E, 2F, D], down [E, D, F] for the
    forward products, up_t [E, D, 2F] and down_t [E, F, D] for the input gradients."""

    up: tuple[Tensor, Tensor]
    down: tuple[Tensor, Tensor]
    up_t: tuple[Tensor, Tensor]
    down_t: tuple[Tensor, Tensor]


def quantize_weights(w_up: Tensor, w_down: Tensor) -> Weights:
    """w_up [E, 2F, D], w_down [E, D, F] in bf16, fp16 or fp32 → `Weights`. Raises ValueError for another dtype."""
    w_up, w_down = w_up.detach(), w_down.detach()
    wanted = (w_up, w_down, w_up.transpose(1, 2).contiguous(), w_down.transpose(1, 2).contiguous())
    return Weights(*[ops.fp8_quantize_rows(weight) for weight in wanted])


class _Experts(torch.autograd.Function):
    """Quantise, gather, experts and combine, with gradients of x, row_weight and both weights."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        row_weight: Tensor,
        w_up: Tensor,
        w_down: Tensor,
        weights: Weights,
        metadata: Metadata,
        top_k: int,
        fp8_wgrad: bool,
    ) -> Tensor:
        offsets = metadata[2]
        rows = ops.fp8_permute_quantize(x, *metadata, top_k=top_k)
        z, act = scaled_mm.fp8_up_swiglu(*rows, *weights.up, offsets)
        y = scaled_mm.fp8_grouped_mm(
            *ops.fp8_quantize_rows(act, offsets), *weights.down, offsets, row_weight=row_weight
        )
        ctx.save_for_backward(x, row_weight, z, *metadata)
        ctx.weights, ctx.top_k, ctx.fp8_wgrad = weights, top_k, fp8_wgrad
        out: Tensor = sum_rows(y, *metadata, top_k)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, row_weight, z, *rest = ctx.saved_tensors
        metadata: Metadata = (rest[0], rest[1], rest[2])
        offsets, grad = metadata[2], grads[0].contiguous()
        rows = ops.fp8_permute_quantize(grad, *metadata, top_k=ctx.top_k)
        dz, scaled, d_weight = scaled_mm.fp8_dgrad_swiglu(*rows, *ctx.weights.down_t, z, row_weight, offsets)
        dx = scaled_mm.fp8_grouped_mm(*ops.fp8_quantize_rows(dz, offsets), *ctx.weights.up_t, offsets)
        dx = sum_rows(dx, *metadata, ctx.top_k)
        wgrad = _fp8_wgrad if ctx.fp8_wgrad else grouped_mm_wgrad
        d_down = wgrad(permute_rows(grad, *metadata, ctx.top_k), scaled, offsets)
        d_up = wgrad(dz, permute_rows(x, *metadata, ctx.top_k), offsets)
        return dx, d_weight, d_up, d_down, None, None, None, None


def _fp8_wgrad(grad: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:
    """grad [R, N], rows [R, K] bf16 → [E, N, K], both quantised along the experts' columns."""
    grad_t, grad_scale, padded = ops.fp8_quantize_columns_t(grad, offsets)
    rows_t, rows_scale, _ = ops.fp8_quantize_columns_t(rows, offsets)
    out: Tensor = scaled_mm.fp8_grouped_mm_wgrad(grad_t, grad_scale, rows_t, rows_scale, padded)
    return out


def fp8_layer(
    x: Tensor,
    logits: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    weights: Weights,
    top_k: int,
    *,
    fp8_wgrad: bool = False,
) -> Tensor:
    """x [T, D] bf16, logits [T, E] fp32, and `weights` of w_up [E, 2F, D], w_down [E, D, F] bf16 → [T, D] bf16.

    `weights` is what is multiplied; w_up and w_down are there to get the gradients. `fp8_wgrad`: weight gradients in
    FP8. Raises ValueError for a dtype other than bf16.
    """
    if x.dtype != torch.bfloat16:
        raise ValueError(f"fp8_layer: x must be bf16, got {x.dtype}")
    weight, ids = ops.route(logits, None, score="none", top_k=top_k, weight_from="softmax_selected")
    metadata = ops.sort_by_expert(ids, w_up.shape[0])
    row_weight = ops.gather_weights(weight, *metadata)
    apply: Callable[..., Tensor] = _Experts.apply  # untyped in torch
    return apply(x, row_weight, w_up, w_down, weights, metadata, top_k, fp8_wgrad)


class Fp8(Block):
    """FP8 in the forward products and the input gradients, bf16 weight gradients."""

    name = "fp8"
    fp8_wgrad = False
    low_precision = True

    def __init__(self, *, compiled: bool) -> None:
        """`compiled` is of the other rows: this block is never compiled."""

    def setup(self, cfg: Cfg, w_up: Tensor, w_down: Tensor) -> None:
        """As `Block`, and quantises the weights."""
        super().setup(cfg, w_up, w_down)
        self.weights = quantize_weights(w_up, w_down)

    def fwd(self, x: Tensor, logits: Tensor) -> Tensor:
        """The output [T, D]."""
        w_up, w_down = self.params
        return fp8_layer(x, logits, w_up, w_down, self.weights, self.top_k, fp8_wgrad=self.fp8_wgrad)

    def casts(self, inputs: Inputs) -> dict[str, Callable[[int], Any]]:
        """What quantises activations and gradients in one pass and does nothing else, by pass, on random numbers; of
        the inputs' routing. Weights are not counted, nor is what is quantised on its way to the experts."""
        (experts, two_f, d_model), top_k = self.params[0].shape, self.top_k
        with torch.no_grad():
            _, ids = ops.route(inputs.logits, None, score="none", top_k=top_k, weight_from="softmax_selected")
            offsets = ops.sort_by_expert(ids, experts)[2]
        x, rows = inputs.x, inputs.x.shape[0] * top_k
        act, dz, wide = (torch.randn(rows, n, device=x.device, dtype=x.dtype) for n in (two_f // 2, two_f, d_model))

        def forward(_: int) -> None:
            ops.fp8_quantize_rows(act, offsets)

        def forward_backward(count: int) -> None:
            forward(count)
            ops.fp8_quantize_rows(dz, offsets)
            for each in (wide, act, dz, wide) if self.fp8_wgrad else ():
                ops.fp8_quantize_columns_t(each, offsets)

        return {"forward": forward, "forward_backward": forward_backward}


class Fp8Wgrad(Fp8):
    """FP8 in all products."""

    name = "fp8-wgrad"
    fp8_wgrad = True
