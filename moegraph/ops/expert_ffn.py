"""The experts as one operator: gather, up projection, activation, down projection, router weight; and its gradient.

    z = x[token of row] · W_upᵀ (+ b_up)     kept for backward (with x and the int32 metadata, nothing else)
    y = row_weight · (act(z) · W_downᵀ (+ b_down))

`combine` of y is then a plain sum. In backward `expert_ffn_dgrad` makes, in one product over the rows of the output's
gradient, the gradients of z and of the router weight and the scaled activation that the weight gradient of W_down
needs; the rest are `grouped_mm_dgrad`, two `grouped_mm_wgrad`, `permute` and `combine`, each an operator of its own, so
that a schedule can put weight gradients off. (What is saved, and the router gradient without the output: SonicMoE,
arXiv 2512.14080.) With `recompute` z is not kept either: backward makes it again from the rows of x that it gathers
anyway, at the price of one more up projection.

Legend: T tokens, D model width, F expert width, E experts, K top-k, R = T·K rows sorted by expert.
"""

from typing import Any

import torch
from torch import Tensor

from moegraph.ops.expert_bias import add_expert_bias, expert_bias_wgrad, expert_of_row
from moegraph.ops.grouped_mm import grouped_mm, grouped_mm_dgrad, grouped_mm_wgrad, product, product_dgrad, uses_kernels
from moegraph.ops.permute import permute_rows, sum_rows

Clamp = tuple[float, float]


def activation_slopes(z: Tensor, alpha: float, limit: float) -> tuple[Tensor, Tensor, Tensor]:
    """(activation, its derivative by gate, its derivative by up) in fp32 (fp64 for fp64); limit 0 is plain SwiGLU."""
    gate, up = (z if z.dtype == torch.float64 else z.float()).chunk(2, -1)
    if not limit:
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        return silu * up, up * (sigmoid + silu * (1 - sigmoid)), silu
    free_gate, free_up = gate <= limit, up.abs() <= limit
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit) + 1
    sigmoid = torch.sigmoid(alpha * gate)
    by_gate = up * sigmoid * (1 + alpha * gate * (1 - sigmoid))
    by_up = gate * sigmoid
    return by_up * up, torch.where(free_gate, by_gate, 0), torch.where(free_up, by_up, 0)


def gated_gradient(
    da: Tensor, z: Tensor, row_weight: Tensor, offsets: Tensor, alpha: float, limit: float
) -> tuple[Tensor, Tensor, Tensor]:
    """What `expert_ffn_dgrad` makes of da [R, F], the gradient of the activation before the router weight."""
    real = (torch.arange(da.shape[0], device=da.device) < offsets[-1])[:, None]
    da = da.to(row_weight.dtype)
    act, by_gate, by_up = activation_slopes(torch.where(real, z, 0), alpha, limit)
    weight = torch.where(real, row_weight[:, None], 0)
    weighted = da * weight
    dz = torch.cat([weighted * by_gate, weighted * by_up], 1)
    return dz.to(z.dtype), (act * weight).to(z.dtype), (da * act).sum(1)


@torch.library.custom_op("moegraph::expert_ffn", mutates_args=())
def _expert_ffn(
    x: Tensor,
    order: Tensor,
    inverse: Tensor,
    offsets: Tensor,
    row_weight: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    b_up: Tensor | None,
    b_down: Tensor | None,
    top_k: int,
    alpha: float,
    limit: float,
    recompute: bool,
) -> tuple[Tensor, Tensor]:
    if uses_kernels("up_swiglu", x, w_up.shape[1] // 2, x.shape[1], order.shape[0], offsets.shape[0]):
        from moegraph.kernels import rows_gemm
        from moegraph.kernels.activation import Activation
        from moegraph.kernels.up_swiglu import up_swiglu

        activation = Activation.of(alpha, limit)
        w_up, w_down, row_weight = w_up.contiguous(), w_down.contiguous(), row_weight.contiguous()
        b_up, b_down = (None if bias is None else bias.contiguous() for bias in (b_up, b_down))
        z, act = up_swiglu(x, order, inverse, w_up, offsets, top_k=top_k, bias=b_up, activation=activation)
        return rows_gemm.grouped_mm(act, w_down, offsets, bias=b_down, row_weight=row_weight), z
    rows = permute_rows(x, order, inverse, offsets, top_k)
    z = product(rows, w_up.contiguous(), offsets)
    z = z if b_up is None else add_expert_bias(z, b_up, offsets)
    act = activation_slopes(z, alpha, limit)[0].to(x.dtype)
    y = product(act, w_down.contiguous(), offsets)
    y = y if b_down is None else add_expert_bias(y, b_down, offsets)
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
    b_up: Tensor | None,
    b_down: Tensor | None,
    top_k: int,
    alpha: float,
    limit: float,
    recompute: bool,
) -> tuple[Tensor, Tensor]:
    rows = order.shape[0]
    return x.new_empty(rows, w_down.shape[1]), x.new_empty(rows, w_up.shape[1])


@torch.library.custom_op("moegraph::expert_ffn_dgrad", mutates_args=())
def expert_ffn_dgrad(
    grad: Tensor, z: Tensor, row_weight: Tensor, w_down: Tensor, offsets: Tensor, alpha: float, limit: float
) -> tuple[Tensor, Tensor, Tensor]:
    """grad [R, D], z [R, 2F], row_weight [R], w_down [E, D, F] → dz [R, 2F], row_weight · activation [R, F], and the
    gradient of row_weight [R]. Rows past offsets[-1] are zeros. `limit` 0 is plain SwiGLU, else the clamped one."""
    grad = grad.contiguous()
    kernel = "grouped_mm_dgrad" if limit else "dgrad_swiglu"  # the clamped activation has a kernel of its own
    if uses_kernels(kernel, grad, w_down.shape[2], w_down.shape[1], grad.shape[0], offsets.shape[0]):
        from moegraph.kernels.activation import Activation
        from moegraph.kernels.dgrad_swiglu import dgrad_swiglu

        activation = Activation.of(alpha, limit)
        tensors = (w_down.contiguous(), z.contiguous(), row_weight.contiguous())
        return dgrad_swiglu(grad, *tensors, offsets, activation=activation)
    return gated_gradient(product_dgrad(grad, w_down.contiguous(), offsets), z, row_weight, offsets, alpha, limit)


@expert_ffn_dgrad.register_fake
def _(
    grad: Tensor, z: Tensor, row_weight: Tensor, w_down: Tensor, offsets: Tensor, alpha: float, limit: float
) -> tuple[Tensor, Tensor, Tensor]:
    return z.new_empty(z.shape), z.new_empty(z.shape[0], w_down.shape[2]), row_weight.new_empty(z.shape[0])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.top_k, ctx.alpha, ctx.limit, ctx.recompute = inputs
    ctx.save_for_backward(*tensors, None if ctx.recompute else output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _grad_z: Tensor | None) -> tuple[Tensor | None, ...]:
    x, order, inverse, offsets, row_weight, w_up, w_down, b_up, b_down, z = ctx.saved_tensors
    rows = None
    if z is None:
        rows = permute_rows(x, order, inverse, offsets, ctx.top_k)
        z = grouped_mm(rows, w_up, offsets)
        z = z if b_up is None else add_expert_bias(z, b_up, offsets)
    dz, scaled, d_weight = expert_ffn_dgrad(grad, z, row_weight, w_down, offsets, ctx.alpha, ctx.limit)
    d_down = grouped_mm_wgrad(grad, scaled, offsets)
    dx = sum_rows(grouped_mm_dgrad(dz, w_up, offsets), order, inverse, offsets, ctx.top_k)
    rows = permute_rows(x, order, inverse, offsets, ctx.top_k) if rows is None else rows
    d_up = grouped_mm_wgrad(dz, rows, offsets)
    d_b_up = d_b_down = None
    if b_up is not None:
        d_b_up = expert_bias_wgrad(dz, offsets)
    if b_down is not None:
        d_b_down = expert_bias_wgrad((grad * row_weight[:, None]).to(grad.dtype), offsets)
        expert, real = expert_of_row(grad.shape[0], offsets)
        bias = b_down.index_select(0, expert).to(row_weight.dtype)
        d_weight = d_weight + torch.where(real, (grad * bias).sum(1), 0.0)
    return dx, None, None, None, d_weight, d_up, d_down, d_b_up, d_b_down, None, None, None, None


_expert_ffn.register_autograd(_backward, setup_context=_setup)


def expert_ffn(
    x: Tensor,
    order: Tensor,
    inverse: Tensor,
    offsets: Tensor,
    row_weight: Tensor,
    w_up: Tensor,
    w_down: Tensor,
    b_up: Tensor | None = None,
    b_down: Tensor | None = None,
    *,
    top_k: int,
    clamp: Clamp | None = None,
    recompute: bool = False,
) -> tuple[Tensor, Tensor]:
    """x [T, D], order and inverse [R], offsets [E], row_weight [R], w_up [E, 2F, D], w_down [E, D, F] → y, z.

    b_up [E, 2F] and b_down [E, D] are biases of the experts; `clamp` = (alpha, limit) is the clamped SwiGLU, None the
    plain one. y [R, D] and z [R, 2F]. y is weighted: `combine` sums it. z is the pre-activation, an output because it
    is what backward keeps (unless `recompute`); it has no gradient. Rows past offsets[-1] are zeros. Raises ValueError
    for a bias of another shape or dtype than x's, and for a clamp that is not above zero.
    """
    alpha, limit = clamp if clamp is not None else (0.0, 0.0)
    if clamp is not None and not (alpha > 0 and limit > 0):
        raise ValueError(f"expert_ffn: clamp {clamp} is not (alpha, limit) with both above zero")
    for name, bias, width in (("b_up", b_up, w_up.shape[1]), ("b_down", b_down, w_down.shape[1])):
        if bias is not None and (bias.shape != (w_up.shape[0], width) or bias.dtype != x.dtype):
            wanted = f"[{w_up.shape[0]}, {width}] of {x.dtype}"
            raise ValueError(f"expert_ffn: {name} must be {wanted}, got {list(bias.shape)} of {bias.dtype}")
    result: tuple[Tensor, Tensor] = _expert_ffn(
        x.contiguous(),
        order,
        inverse,
        offsets,
        row_weight,
        w_up,
        w_down,
        b_up,
        b_down,
        top_k,
        alpha,
        limit,
        recompute,
    )
    return result
