"""The experts as one operator: gather, up projection, SwiGLU, down projection, router weight; and its gradient.

    z = x[token of row] · W_upᵀ          kept for backward (with x and the int32 metadata, nothing else)
    y = row_weight · (silu(gate) · up) · W_downᵀ

`combine` of y is then a plain sum. In backward `expert_ffn_dgrad` makes, in one product over the rows of the output's
gradient, the gradients of z and of the router weight and the scaled activation that the weight gradient of W_down
needs; the rest are `grouped_mm_dgrad`, two `grouped_mm_wgrad`, `permute` and `combine`, each an operator of its own, so
that a schedule can put weight gradients off. (What is saved, and the router gradient without the output: SonicMoE,
arXiv 2512.14080.)

Legend: T tokens, D model width, F expert width, E experts, K top-k, R = T·K rows sorted by expert.
"""

from typing import Any

import torch
from torch import Tensor

from moegraph.ops.grouped_mm import grouped_mm_dgrad, grouped_mm_wgrad, loop_rows, uses_kernels
from moegraph.ops.permute import permute_rows, sum_rows


def _activation(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(silu(gate) · up, silu(gate), slope of silu at gate), in fp32 (fp64 for fp64)."""
    wide = z if z.dtype == torch.float64 else z.float()
    gate, up = wide.chunk(2, -1)
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    return silu * up, silu, sigmoid + silu * (1 - sigmoid)


@torch.library.custom_op("moegraph::expert_ffn", mutates_args=())
def _expert_ffn(
    x: Tensor,
    order: Tensor,
    inverse: Tensor,
    offsets: Tensor,
    row_weight: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    top_k: int,
) -> tuple[Tensor, Tensor]:
    if uses_kernels(x, w_up.shape[1] // 2, x.shape[1]):
        from moegraph.kernels.rows_gemm import grouped_mm
        from moegraph.kernels.up_swiglu import up_swiglu

        token = torch.div(order, top_k, rounding_mode="floor")
        z, act = up_swiglu(x, token, w_up, offsets)
        return grouped_mm(act, w_down, offsets, row_weight=row_weight), z
    rows = permute_rows(x, order, inverse, offsets, top_k)
    z = loop_rows(rows, w_up.transpose(1, 2), offsets, w_up.shape[1])
    act = _activation(z)[0].to(x.dtype)
    y = loop_rows(act, w_down.transpose(1, 2), offsets, w_down.shape[1])
    return (y * row_weight[:, None]).to(x.dtype), z


@_expert_ffn.register_fake
def _(
    x: Tensor,
    order: Tensor,
    inverse: Tensor,
    offsets: Tensor,
    row_weight: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    top_k: int,
) -> tuple[Tensor, Tensor]:
    rows = order.shape[0]
    return x.new_empty(rows, w_down.shape[1]), x.new_empty(rows, w_up.shape[1])


@torch.library.custom_op("moegraph::expert_ffn_dgrad", mutates_args=())
def expert_ffn_dgrad(
    grad: Tensor, z: Tensor, row_weight: Tensor, w_down: Tensor, offsets: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """grad [R, D], z [R, 2F], row_weight [R], w_down [E, D, F] → dz [R, 2F], row_weight · activation [R, F], and the
    gradient of row_weight [R]. Rows past offsets[-1] are zeros."""
    grad = grad.contiguous()
    if uses_kernels(grad, w_down.shape[2], w_down.shape[1]):
        from moegraph.kernels.dgrad_swiglu import dgrad_swiglu

        return dgrad_swiglu(grad, w_down, z, row_weight, offsets)
    real = (torch.arange(grad.shape[0], device=grad.device) < offsets[-1])[:, None]
    da = loop_rows(grad, w_down, offsets, w_down.shape[2]).to(row_weight.dtype)
    act, silu, slope = _activation(torch.where(real, z, 0))
    up = torch.where(real, z, 0).to(act.dtype).chunk(2, -1)[1]
    weighted = da * torch.where(real, row_weight[:, None], 0)
    dz = torch.cat([weighted * up * slope, weighted * silu], 1)
    scaled = act * torch.where(real, row_weight[:, None], 0)
    return dz.to(z.dtype), scaled.to(z.dtype), (da * act).sum(1)


@expert_ffn_dgrad.register_fake
def _(grad: Tensor, z: Tensor, row_weight: Tensor, w_down: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return z.new_empty(z.shape), z.new_empty(z.shape[0], w_down.shape[2]), row_weight.new_empty(z.shape[0])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.top_k = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _grad_z: Tensor | None) -> tuple[Tensor | None, ...]:
    x, order, inverse, offsets, row_weight, w_up, w_down, z = ctx.saved_tensors
    dz, scaled, d_weight = expert_ffn_dgrad(grad, z, row_weight, w_down, offsets)
    d_down = grouped_mm_wgrad(grad, scaled, offsets)
    dx = sum_rows(grouped_mm_dgrad(dz, w_up, offsets), order, inverse, offsets, ctx.top_k)
    d_up = grouped_mm_wgrad(dz, permute_rows(x, order, inverse, offsets, ctx.top_k), offsets)
    return dx, None, None, None, d_weight, d_up, d_down, None


_expert_ffn.register_autograd(_backward, setup_context=_setup)


def expert_ffn(
    x: Tensor,
    order: Tensor,
    inverse: Tensor,
    offsets: Tensor,
    row_weight: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    *,
    top_k: int,
) -> tuple[Tensor, Tensor]:
    """x [T, D], order and inverse [R], offsets [E], row_weight [R], w_up [E, 2F, D], w_down [E, D, F] → y, z.

    y [R, D] and z [R, 2F]. y is weighted: `combine` sums it. z is the pre-activation, an output because it is what
    backward keeps; it has no gradient. Rows past offsets[-1] are zeros.
    """
    result: tuple[Tensor, Tensor] = _expert_ffn(
        x.contiguous(), order, inverse, offsets, row_weight, w_up, w_down, top_k
    )
    return result
