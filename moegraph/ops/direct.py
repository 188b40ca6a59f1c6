"""Dispatch and return by writing rows straight into the memory of other ranks; the host waits for nothing.

    rows, row_weight, origin = direct_dispatch(x, weights, destination, …)    rows of its own experts, from all ranks
    out                      = direct_return(y, origin, destination, …)       each token's sum over its K rows

They are each other's adjoint: the gradient of a dispatch is a return of gradients (with those of the weights), the
gradient of a return is a dispatch. Where rows go is `moegraph.ops.direct_plan`'s answer.

On CUDA the buffers are symmetric memory (`moegraph.runtime.symmetric`) and rows go over NVLink, written by Triton and
signalled on the device. Results are copied out of the buffers into memory of their own, so that nothing that autograd
keeps aliases a buffer that the next layer writes to: a copy at memory speed, about a fifth of the time on the link.

On the CPU, and for simulated ranks, they run their declared equivalent: whole buckets of R rows through the
`all_to_all` that the transport `padded` uses (`moegraph.ops.exchange`), then each row to its place. Values are bitwise
those of `direct` and of `padded`. CUDA tensors without symmetric memory are a RunError, never a silent detour.

Rows that go out may be payloads of MXFP8 (`moegraph.ops.mx_payload`), uint8: `direct_dispatch` and `direct_put` move
their bytes. What returns is summed, so it is never a payload.

Legend: T tokens, D width, K top-k, R = T·K slots of this rank, P ranks of the group, N rows of a rank's buffer,
L experts of a rank. Indices are int32 on the device.
"""

from typing import Any

import torch
from torch import Tensor

from moegraph.ops.exchange import all_to_all_start, all_to_all_wait, peers_of_thread
from moegraph.ops.precision import accumulate_dtype


def _on_device(x: Tensor) -> bool:
    return x.device.type == "cuda" and peers_of_thread() is None


def _swap(x: Tensor, group: str) -> Tensor:
    """Bucket p of x [P, …] to rank p; returns what the ranks had for this one, [P, …]."""
    sizes = [1] * x.shape[0]
    return all_to_all_wait(all_to_all_start(x.contiguous(), sizes, sizes, group), sizes, sizes, group)


def _put_reference(
    x: Tensor, values: Tensor, destination: Tensor, counts: Tensor, capacity: int, group: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Row s of each bucket is slot s, where the rank that gets it is the owner; then each row goes to its place."""
    ranks, slots, top_k = counts.shape[0], destination.shape[0], destination.shape[0] // x.shape[0]
    numbers = torch.arange(ranks, device=x.device)[:, None]
    goes = (destination >= 0) & (torch.div(destination, capacity, rounding_mode="floor") == numbers)
    places = _swap(torch.where(goes, destination % capacity, -1), group).reshape(-1)

    def placed(sent: Tensor) -> Tensor:
        chosen = torch.where(goes.reshape(ranks, slots, *[1] * (sent.dim() - 1)), sent, 0)
        arrived = _swap(chosen, group).reshape(ranks * slots, *sent.shape[1:])
        return _placed(arrived, places, capacity)

    origin = _placed(torch.arange(ranks * slots, dtype=torch.int32, device=x.device), places, capacity)
    return placed(x.repeat_interleave(top_k, 0)), placed(values.reshape(-1)), origin


def _placed(rows: Tensor, places: Tensor, count: int) -> Tensor:
    """Row i of `rows` as row places[i] of a new tensor [count, …] of zeros; those at -1 are left out."""
    spare = torch.where(places >= 0, places, count).to(torch.int64)
    return rows.new_zeros(count + 1, *rows.shape[1:]).index_copy_(0, spare, rows)[:count].clone()


def _take_reference(
    y: Tensor, values: Tensor, origin: Tensor, destination: Tensor, offsets: Tensor, ranks: int, top_k: int, group: str
) -> tuple[Tensor, Tensor]:
    """Each row to its slot's place in the bucket of the rank it came from; then each slot takes its owner's bucket."""
    slots, capacity = destination.shape[0], y.shape[0]
    exists = torch.arange(capacity, device=y.device) < offsets[-1]
    places = torch.where(exists, origin, -1)
    owner = torch.div(destination.clamp(min=0), capacity, rounding_mode="floor").to(torch.int64)
    bucket = owner * slots + torch.arange(slots, device=y.device)

    def returned(sent: Tensor) -> Tensor:
        arrived = _swap(_placed(sent, places, ranks * slots).reshape(ranks, slots, *sent.shape[1:]), group)
        found = arrived.reshape(ranks * slots, *sent.shape[1:]).index_select(0, bucket)
        return torch.where((destination >= 0).reshape(-1, *[1] * (sent.dim() - 1)), found, 0)

    wide = accumulate_dtype(y.dtype)
    rows = returned(y).reshape(-1, top_k, *y.shape[1:])
    total = rows.new_zeros(rows.shape[0], *y.shape[1:], dtype=wide)
    for j in range(top_k):  # slot order, as `combine`
        total += rows[:, j]
    return total.to(y.dtype), returned(values).reshape(-1, top_k)


@torch.library.custom_op("moegraph::direct_dispatch", mutates_args=())
def _dispatch(
    x: Tensor, weights: Tensor, destination: Tensor, offsets: Tensor, counts: Tensor, capacity: int, group: str
) -> tuple[Tensor, Tensor, Tensor]:
    if _on_device(x):
        from moegraph.runtime import symmetric

        return symmetric.put(x, weights, destination, offsets, counts, capacity, group)
    return _put_reference(x, weights, destination, counts, capacity, group)


@_dispatch.register_fake
def _(
    x: Tensor, weights: Tensor, destination: Tensor, offsets: Tensor, counts: Tensor, capacity: int, group: str
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(capacity, x.shape[1]), weights.new_empty(capacity), destination.new_empty(capacity)


@torch.library.custom_op("moegraph::direct_put", mutates_args=())
def direct_put(x: Tensor, destination: Tensor, offsets: Tensor, counts: Tensor, capacity: int, group: str) -> Tensor:
    """Gradient of `direct_return`: x [T, D], the gradients of its sums → those of the rows [N, D]."""
    if _on_device(x):
        from moegraph.runtime import symmetric

        return symmetric.put(x, None, destination, offsets, counts, capacity, group)[0]
    return _put_reference(x, x.new_zeros(destination.shape[0]), destination, counts, capacity, group)[0]


@direct_put.register_fake
def _(x: Tensor, destination: Tensor, offsets: Tensor, counts: Tensor, capacity: int, group: str) -> Tensor:
    return x.new_empty(capacity, x.shape[1])


@torch.library.custom_op("moegraph::direct_return", mutates_args=())
def _return(
    y: Tensor, origin: Tensor, destination: Tensor, offsets: Tensor, counts: Tensor, top_k: int, group: str
) -> Tensor:
    if _on_device(y):
        from moegraph.runtime import symmetric

        return symmetric.take(y, None, origin, destination, offsets, top_k, group)[0]
    nothing = y.new_zeros(y.shape[0])
    return _take_reference(y, nothing, origin, destination, offsets, counts.shape[0], top_k, group)[0]


@_return.register_fake
def _(
    y: Tensor, origin: Tensor, destination: Tensor, offsets: Tensor, counts: Tensor, top_k: int, group: str
) -> Tensor:
    return y.new_empty(destination.shape[0] // top_k, y.shape[1])


@torch.library.custom_op("moegraph::direct_take", mutates_args=())
def direct_take(
    grad: Tensor,
    grad_weight: Tensor,
    origin: Tensor,
    destination: Tensor,
    offsets: Tensor,
    counts: Tensor,
    top_k: int,
    group: str,
) -> tuple[Tensor, Tensor]:
    """Gradient of `direct_dispatch`: grad [N, D] and grad_weight [N] of the rows → those of x [T, D] and of the weights
    [T, K]. A slot that went nowhere gets zeros."""
    if _on_device(grad):
        from moegraph.runtime import symmetric

        return symmetric.take(grad, grad_weight, origin, destination, offsets, top_k, group)
    return _take_reference(grad, grad_weight, origin, destination, offsets, counts.shape[0], top_k, group)


@direct_take.register_fake
def _(
    grad: Tensor,
    grad_weight: Tensor,
    origin: Tensor,
    destination: Tensor,
    offsets: Tensor,
    counts: Tensor,
    top_k: int,
    group: str,
) -> tuple[Tensor, Tensor]:
    tokens = destination.shape[0] // top_k
    return grad.new_empty(tokens, grad.shape[1]), grad_weight.new_empty(tokens, top_k)


def _dispatch_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, weights, destination, offsets, counts, _, ctx.group = inputs
    ctx.top_k = weights.shape[1]
    ctx.save_for_backward(output[2], destination, offsets, counts)
    ctx.mark_non_differentiable(output[2])


def _dispatch_backward(
    ctx: Any, grad: Tensor, grad_weight: Tensor, _origin: Tensor | None
) -> tuple[Tensor | None, ...]:
    found = direct_take(grad.contiguous(), grad_weight.contiguous(), *ctx.saved_tensors, ctx.top_k, ctx.group)
    return found[0], found[1], None, None, None, None, None


def _return_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    y, _, destination, offsets, counts, _, ctx.group = inputs
    ctx.capacity = y.shape[0]
    ctx.save_for_backward(destination, offsets, counts)


def _return_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return (direct_put(grad.contiguous(), *ctx.saved_tensors, ctx.capacity, ctx.group), *[None] * 6)


_dispatch.register_autograd(_dispatch_backward, setup_context=_dispatch_setup)
_return.register_autograd(_return_backward, setup_context=_return_setup)


def direct_dispatch(
    x: Tensor, weights: Tensor, destination: Tensor, offsets: Tensor, counts: Tensor, capacity: int, group: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Token rows x [T, D] with their router weights [T, K] to the ranks of their experts.

    destination [R], offsets [L] and counts [P, E + 1] are those of `direct_plan` at the same capacity N. Returns the
    rows of this rank's experts [N, D], sorted by (expert, source rank, slot) and zeros past offsets[-1], the weight of
    each [N], and its origin [N] int32, source · R + slot. Every rank of the group has to call it.
    """
    weights = weights.contiguous()
    result: tuple[Tensor, Tensor, Tensor] = _dispatch(
        x.contiguous(), weights, destination, offsets, counts, capacity, group
    )
    return result


def direct_return(
    y: Tensor, origin: Tensor, destination: Tensor, offsets: Tensor, counts: Tensor, top_k: int, group: str
) -> Tensor:
    """Rows y [N, D], as dispatched, to where they came from, and there the sum over each token's K rows: [T, D].

    Accumulated in float32 (float64 for float64) in slot order and rounded once, as `combine` does. Rows past
    offsets[-1] are not read, and slots that went nowhere count as zeros. Every rank of the group has to call it.
    """
    out: Tensor = _return(y.contiguous(), origin, destination, offsets, counts, top_k, group)
    return out
