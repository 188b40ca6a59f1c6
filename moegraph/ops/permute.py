"""Moving rows between token order and expert order.

A *slot* is t·K + j, the j-th choice of token t; a *row* is a slot's place after sorting by expert. `order[row]` is its
slot, `inverse[slot]` its row, `offsets[e]` the inclusive end of expert e's rows. A choice outside 0 … E-1 is a dropped
slot: sorted behind all others, past `offsets[-1]`, where rows do not exist (written as zeros, never read).

`permute` and `combine` are each other's adjoint, so each is the other's backward and no gradient needs atomics.

Legend: T tokens, D model width, E experts, K top-k, R routed rows = T·K. Indices are int32.
"""

from typing import Any

import torch
from torch import Tensor

from moegraph.ops.precision import accumulate_dtype


@torch.library.custom_op("moegraph::sort_by_expert", mutates_args=())
def _sort_by_expert(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    if ids.device.type == "cuda" and ids.dtype == torch.int32:
        from moegraph.kernels import sort_rows

        if num_experts <= sort_rows.MAX_EXPERTS:
            return sort_rows.sort_by_expert(ids, num_experts)
    flat = ids.reshape(-1)
    key = torch.where((flat >= 0) & (flat < num_experts), flat, num_experts)
    key, order = torch.sort(key, stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0], device=ids.device)
    experts = torch.arange(num_experts, dtype=key.dtype, device=ids.device)
    offsets = torch.searchsorted(key, experts, right=True, out_int32=True)
    return order.to(torch.int32), inverse.to(torch.int32), offsets


@_sort_by_expert.register_fake
def _(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    def index(size: Any) -> Tensor:
        return ids.new_empty(size, dtype=torch.int32)

    return index(ids.numel()), index(ids.numel()), index(num_experts)


def sort_by_expert(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Chosen experts ids [T, K] → (order [R], inverse [R], offsets [E]), all int32; the sort is stable.

    On CUDA moegraph's Triton kernels sort int32 ids of up to 1024 experts; elsewhere torch.sort gives the same rows.
    Equal ids always give equal rows, so the order of accumulation in every weight gradient is reproducible.
    """
    result: tuple[Tensor, Tensor, Tensor] = _sort_by_expert(ids, num_experts)
    return result


def _zero_past(rows: Tensor, offsets: Tensor) -> Tensor:
    """Zeros in place past offsets[-1]: on CPU by slice, on a device without the host reading the count."""
    if rows.device.type == "cpu":
        rows[int(offsets[-1]) :].zero_()
        return rows
    past = torch.arange(rows.shape[0], dtype=torch.int32, device=rows.device) >= offsets[-1]
    return rows.masked_fill_(past.view(-1, *[1] * (rows.dim() - 1)), 0)


def _uses_kernels(x: Tensor) -> bool:
    """moegraph's Triton kernels move rows on CUDA, of bytes too; they sum in fp32, so fp64 stays with torch."""
    return x.device.type == "cuda" and x.dtype in (torch.bfloat16, torch.float16, torch.float32, torch.uint8)


@torch.library.custom_op("moegraph::permute", mutates_args=())
def permute_rows(x: Tensor, order: Tensor, inverse: Tensor, offsets: Tensor, top_k: int) -> Tensor:
    """The operator behind `permute`, for formulas of gradients."""
    if _uses_kernels(x):
        from moegraph.kernels import move_rows

        return move_rows.permute(x.contiguous(), inverse, offsets, top_k)
    token = torch.div(order, top_k, rounding_mode="floor")
    return _zero_past(x.index_select(0, token), offsets)


@permute_rows.register_fake
def _(x: Tensor, order: Tensor, inverse: Tensor, offsets: Tensor, top_k: int) -> Tensor:
    return x.new_empty(order.shape[0], x.shape[1])


@torch.library.custom_op("moegraph::combine", mutates_args=())
def sum_rows(y: Tensor, order: Tensor, inverse: Tensor, offsets: Tensor, top_k: int) -> Tensor:
    """The operator behind `combine`, for formulas of gradients."""
    if _uses_kernels(y):
        from moegraph.kernels import move_rows

        return move_rows.combine(y.contiguous(), inverse, offsets, top_k)
    wide = accumulate_dtype(y.dtype)
    row_of = inverse.reshape(-1, top_k)
    on_cpu = y.device.type == "cpu"
    full = on_cpu and int(offsets[-1]) == y.shape[0]
    if not full:
        exists = (row_of < offsets[-1])[:, :, None]
        row_of = torch.where(exists[:, :, 0], row_of, 0)
    total = y.new_zeros(row_of.shape[0], y.shape[1], dtype=wide)
    for j in range(top_k):  # slot order, so that the sum is the same bits everywhere
        part = y.index_select(0, row_of[:, j])
        total += part if full else torch.where(exists[:, j], part, 0.0)
    return total if wide == y.dtype else total.to(y.dtype)


@sum_rows.register_fake
def _(y: Tensor, order: Tensor, inverse: Tensor, offsets: Tensor, top_k: int) -> Tensor:
    return y.new_empty(inverse.shape[0] // top_k, y.shape[1])


def _save_indices(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor, int], output: Tensor) -> None:
    _, order, inverse, offsets, ctx.top_k = inputs
    ctx.save_for_backward(order, inverse, offsets)


def _permute_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None, None]:
    return sum_rows(grad, *ctx.saved_tensors, ctx.top_k), None, None, None, None


def _combine_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None, None]:
    return permute_rows(grad, *ctx.saved_tensors, ctx.top_k), None, None, None, None


permute_rows.register_autograd(_permute_backward, setup_context=_save_indices)
sum_rows.register_autograd(_combine_backward, setup_context=_save_indices)


def permute(x: Tensor, order: Tensor, inverse: Tensor, offsets: Tensor, *, top_k: int) -> Tensor:
    """Token rows x [T, D], or their payload, → expert-sorted rows [R, D]; rows past offsets[-1] are zeros.

    Its gradient is `combine`: each token sums the gradients of its K rows, in slot order.
    """
    rows: Tensor = permute_rows(x, order, inverse, offsets, top_k)
    return rows


def combine(y: Tensor, order: Tensor, inverse: Tensor, offsets: Tensor, *, top_k: int) -> Tensor:
    """Expert-sorted rows y [R, D] → [T, D]: the plain sum of each token's K rows, in slot order.

    Accumulated in float32 (float64 for float64) and rounded once. Rows past offsets[-1] are not read: whatever they
    hold, NaN included, counts as nothing. Its gradient is `permute`.
    """
    out: Tensor = sum_rows(y, order, inverse, offsets, top_k)
    return out


@torch.library.custom_op("moegraph::gather_weights", mutates_args=())
def _gather_weights(weights: Tensor, order: Tensor, inverse: Tensor, offsets: Tensor) -> Tensor:
    if weights.device.type == "cuda":
        from moegraph.kernels import move_rows

        return move_rows.gather_weights(weights.contiguous(), order, offsets)
    return _zero_past(weights.reshape(-1).index_select(0, order), offsets)


@_gather_weights.register_fake
def _(weights: Tensor, order: Tensor, inverse: Tensor, offsets: Tensor) -> Tensor:
    return weights.new_empty(order.shape[0])


@torch.library.custom_op("moegraph::gather_weights_backward", mutates_args=())
def gather_weights_backward(grad: Tensor, inverse: Tensor, offsets: Tensor, top_k: int) -> Tensor:
    """Gradient of `gather_weights`: slot s gets grad[inverse[s]], or zero where that row does not exist; [T, K]."""
    if grad.device.type == "cuda":
        from moegraph.kernels import move_rows

        return move_rows.gather_weights_backward(grad.contiguous(), inverse, offsets, top_k)
    slots = torch.where(inverse < offsets[-1], grad.index_select(0, inverse), 0.0)
    return slots.reshape(-1, top_k)


@gather_weights_backward.register_fake
def _(grad: Tensor, inverse: Tensor, offsets: Tensor, top_k: int) -> Tensor:
    return grad.new_empty(inverse.shape[0] // top_k, top_k)


def _gather_setup(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor], output: Tensor) -> None:
    weights, _, inverse, offsets = inputs
    ctx.save_for_backward(inverse, offsets)
    ctx.top_k = weights.shape[1]


def _gather_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    return gather_weights_backward(grad, *ctx.saved_tensors, ctx.top_k), None, None, None


_gather_weights.register_autograd(_gather_backward, setup_context=_gather_setup)


def gather_weights(weights: Tensor, order: Tensor, inverse: Tensor, offsets: Tensor) -> Tensor:
    """Router weights [T, K] → the weight of each expert-sorted row [R]; zero past offsets[-1]."""
    row_weight: Tensor = _gather_weights(weights, order, inverse, offsets)
    return row_weight
