"""Collectives of the layer graph: all-to-all over a named group of ranks, its start and its wait apart.

    pending = all_to_all_start(x, receive, send, group)        grad_x       = wait(all_to_all(grad, send, receive))
    y       = all_to_all_wait(pending, receive, send, group)   (start and wait change places in the backward)

In a step graph these are `_c10d_functional.all_to_all_single` and `wait_tensor` nodes. The wait's gradient starts the
collective of the backward and the start's gradient waits for it, so other work can run in between in both directions.
A group is named by the mesh axis ("ep"), never by ranks: the graph is the same on every rank, and the name is bound to
a process group when a run starts.

`exact_exchange` is the one exchange whose sizes the host reads: only rows that exist travel. It is opaque, and what it
means is the equal-size exchange of the whole buffers.

Several ranks can be simulated in one process, a thread each (`moegraph.verify.world`): a thread that has `Peers`
exchanges through them instead of through a process group.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

EXPERT_GROUP = "ep"

_c10d = torch.ops._c10d_functional
_local = threading.local()


class Peers(Protocol):
    """The other ranks of a simulated world, as one rank sees them."""

    def all_to_all(self, x: Tensor, receive: Sequence[int], send: Sequence[int], group: str) -> Tensor:
        """What every rank of the group sent to this one, in their order."""


@contextmanager
def simulated(peers: Peers) -> Iterator[None]:
    """Within, collectives of this thread go through `peers`."""
    _local.peers = peers
    try:
        yield
    finally:
        del _local.peers


def peers_of_thread() -> Peers | None:
    """The simulated peers of this thread, if it has any."""
    return getattr(_local, "peers", None)


def _start(x: Tensor, receive: Sequence[int], send: Sequence[int], group: str) -> Tensor:
    peers = peers_of_thread()
    if peers is not None:
        return peers.all_to_all(x, receive, send, group)
    started: Tensor = _c10d.all_to_all_single.default(x.contiguous(), list(receive), list(send), group)
    return started


def _wait(pending: Tensor) -> Tensor:
    if peers_of_thread() is not None:
        return pending.clone()
    arrived: Tensor = _c10d.wait_tensor.default(pending)
    return arrived


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, receive: Sequence[int], send: Sequence[int], group: str) -> Tensor:
        return _start(x, receive, send, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None]:
        return _wait(grads[0]), None, None, None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pending: Tensor, receive: Sequence[int], send: Sequence[int], group: str) -> Tensor:
        ctx.receive, ctx.send, ctx.group = receive, send, group
        return _wait(pending)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None]:
        return _start(grads[0], ctx.send, ctx.receive, ctx.group), None, None, None


def all_to_all_start(x: Tensor, receive: Sequence[int], send: Sequence[int], group: str) -> Tensor:
    """Starts to send the first `send[0]` rows of x [Σ send, …] to rank 0 of the group, the next to rank 1, and so on.

    Returns a tensor [Σ receive, …] that holds nothing until `all_to_all_wait` has waited for it. Every rank of the
    group must call it with what the others expect of it.
    """
    result: Tensor = _Start.apply(x, tuple(receive), tuple(send), group)  # type: ignore[no-untyped-call]
    return result


def all_to_all_wait(pending: Tensor, receive: Sequence[int], send: Sequence[int], group: str) -> Tensor:
    """What `all_to_all_start` with the same sizes started to receive: [Σ receive, …], sorted by sending rank."""
    result: Tensor = _Wait.apply(pending, tuple(receive), tuple(send), group)  # type: ignore[no-untyped-call]
    return result


@torch.library.custom_op("moegraph::exact_exchange", mutates_args=())
def _exact_exchange(x: Tensor, send: Tensor, receive: Tensor, group: str) -> Tensor:
    ranks = send.shape[0]
    capacity = x.shape[0] // ranks
    buckets = x.reshape(ranks, capacity, *x.shape[1:])
    peers = peers_of_thread()
    if peers is not None:
        return peers.all_to_all(x, [capacity] * ranks, [capacity] * ranks, group)
    sent, received = torch.stack([send, receive]).tolist()  # the host waits for the device here
    packed = torch.cat([buckets[rank, :count] for rank, count in enumerate(sent)])
    arrived = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(arrived, packed, received, sent, group=_resolve(group))
    out = torch.zeros_like(buckets)
    begin = 0
    for rank, count in enumerate(received):
        out[rank, :count] = arrived[begin : begin + count]
        begin += count
    return out.reshape(x.shape)


def _resolve(group: str) -> Any:
    from moegraph._torch_compat import resolve_process_group

    return resolve_process_group(group)


@_exact_exchange.register_fake
def _(x: Tensor, send: Tensor, receive: Tensor, group: str) -> Tensor:
    return torch.empty_like(x)


def _exact_setup(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, str], output: Tensor) -> None:
    _, send, receive, ctx.group = inputs
    ctx.save_for_backward(send, receive)


def _exact_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    send, receive = ctx.saved_tensors
    return _exact_exchange(grad.contiguous(), receive, send, ctx.group), None, None, None


_exact_exchange.register_autograd(_exact_backward, setup_context=_exact_setup)


def exact_exchange(x: Tensor, send: Tensor, receive: Tensor, group: str) -> Tensor:
    """Buckets x [P·C, …] for the P ranks of a group → the buckets that they hold for this rank, [P·C, …].

    Of bucket p only the first send[p] rows travel, and of what comes from rank p the first receive[p] rows are filled,
    the rest zeros (send, receive [P] int32, on the device). The host waits for these counts. Its gradient is itself
    with the counts exchanged.
    """
    result: Tensor = _exact_exchange(x.contiguous(), send, receive, group)
    return result
