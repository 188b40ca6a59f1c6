"""The block with experts in MXFP8, as `cast-mxfp8` and `fold-casts` make it of fused experts, for GPUs with MX units.

    x quantised and gathered in one kernel, up projection + SwiGLU that writes z in bf16 and the activation in MXFP8
    down projection, router weight, combine
    the output's gradient quantised and gathered, gradient through down projection and SwiGLU: dz in bf16 and MXFP8
    gradient through the up projection, combine; weight gradients in bf16 from gathered bf16 rows

Weights are quantised when the block is set up, as an optimizer would once per step, along both of their sides. Nothing
is compiled by torch, and no activation is quantised by a kernel of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moegraph import ops
from moegraph.benchmarks.blocks import Cfg
from moegraph.benchmarks.inputs import Inputs
from moegraph.benchmarks.low_precision import Fp8, Metadata, Weights
from moegraph.ops.grouped_mm import grouped_mm_wgrad
from moegraph.ops.permute import permute_rows, sum_rows

_mg = torch.ops.moegraph


def quantize_weights(w_up: Tensor, w_down: Tensor) -> Weights:
    """w_up [E, 2F, D], w_down [E, D, F] → both along both sides, with swizzled scales. Raises ValueError for widths
    that are not whole blocks of 32."""
    w_up, w_down = w_up.detach(), w_down.detach()
    wanted = (w_up, w_down, w_up.transpose(1, 2).contiguous(), w_down.transpose(1, 2).contiguous())
    return Weights(*[ops.mx_quantize_rows(weight, swizzled=True) for weight in wanted])


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
    ) -> Tensor:
        offsets = metadata[2]
        rows = ops.mx_permute_quantize(x, *metadata, top_k=top_k, swizzled=True)
        z, act, act_scale = _mg.mx_up_swiglu_quantized(*rows, *weights.up, offsets)
        y = _mg.mx_grouped_mm(act, act_scale, *weights.down, offsets, None, row_weight, True)
        ctx.save_for_backward(x, row_weight, z, *metadata)
        ctx.weights, ctx.top_k = weights, top_k
        out: Tensor = sum_rows(y, *metadata, top_k)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, row_weight, z, *rest = ctx.saved_tensors
        metadata: Metadata = (rest[0], rest[1], rest[2])
        offsets, grad, weights = metadata[2], grads[0].contiguous(), ctx.weights
        rows = ops.mx_permute_quantize(grad, *metadata, top_k=ctx.top_k, swizzled=True)
        dz, scaled, d_weight, *low = _mg.mx_dgrad_swiglu_quantized(*rows, *weights.down_t, z, row_weight, offsets)
        dx = sum_rows(_mg.mx_grouped_mm(*low, *weights.up_t, offsets, None, None, True), *metadata, ctx.top_k)
        d_down = grouped_mm_wgrad(permute_rows(grad, *metadata, ctx.top_k), scaled, offsets)
        d_up = grouped_mm_wgrad(dz, permute_rows(x, *metadata, ctx.top_k), offsets)
        return dx, d_weight, d_up, d_down, None, None, None


class Mxfp8(Fp8):
    """MXFP8 in the forward products and the input gradients, bf16 weight gradients."""

    name = "mxfp8"

    def setup(self, cfg: Cfg, w_up: Tensor, w_down: Tensor) -> None:
        """As `Block`, and quantises the weights."""
        super(Fp8, self).setup(cfg, w_up, w_down)
        self.weights = quantize_weights(w_up, w_down)

    def fwd(self, x: Tensor, logits: Tensor) -> Tensor:
        """The output [T, D]."""
        w_up, w_down = self.params
        weight, ids = ops.route(logits, None, score="none", top_k=self.top_k, weight_from="softmax_selected")
        metadata = ops.sort_by_expert(ids, w_up.shape[0])
        row_weight = ops.gather_weights(weight, *metadata)
        apply: Callable[..., Tensor] = _Experts.apply  # untyped in torch
        return apply(x, row_weight, w_up, w_down, self.weights, metadata, self.top_k)

    def casts(self, inputs: Inputs) -> dict[str, Callable[[int], Any]]:
        """None: every activation and gradient is quantised by what makes or moves it."""
        return {}
