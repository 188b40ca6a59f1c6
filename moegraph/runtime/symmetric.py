"""Buffers that other ranks of a group write to, and the steps of one exchange through them.

A *channel* is one direction (`out`: rows to their experts; `home`: rows back) of one group of ranks. Each rank has for
it a buffer, flags by which ranks tell each other how far they are (`moegraph.kernels.signals`), and an epoch, all on
the device. A process has one channel of each direction per group, for all layers and for both forward and backward: an
exchange copies what arrived into ordinary memory before it says that the buffer is free, so nothing outlives it there.
Room: N · (D · bytes per element + 8) for `out`, R · (D · bytes + 4) for `home`, once per rank. (To leave the rows of
each layer in a buffer of its own would save the copy, for N · D · 2 bytes of symmetric memory per layer in flight.)

A buffer is made at the first exchange, by all ranks together, and made again, larger, when an exchange needs more (a
capacity level went up); only then does the host wait. It lives until the run's groups end
(`moegraph.runtime.mesh.join`). A rank may drop its own before its peers do: they keep it mapped.

With `poison(True)`, for tests, a buffer is filled with NaN before it is said to be free.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from moegraph._torch_compat import resolve_process_group, symmetric_memory
from moegraph.errors import RunError
from moegraph.kernels import direct_rows
from moegraph.kernels.signals import ARRIVED, FREE, signal_launch, wait_launch

_ALIGNED = 16
_channels: dict[tuple[str, str, torch.device], Channel] = {}
_settings = {"poison": False}


def poison(on: bool) -> None:
    """Whether released buffers are filled with NaN, so that a row read too late is seen."""
    _settings["poison"] = on


@dataclass
class Channel:
    """One direction of a group, as one rank sees it. `table` and `flag_table` [P] int64 are the addresses of the ranks'
    buffers and flags; `flags` [2, P] int32; `epoch` [1] int32. `handles` keep the ranks' memory mapped here."""

    rank: int
    buffer: Tensor
    table: Tensor
    flags: Tensor
    flag_table: Tensor
    epoch: Tensor
    handles: list[Any] = field(default_factory=list)

    def wait_until_free(self) -> None:
        """Before rows are written: every rank has emptied its buffer."""
        wait_launch(self.flags, self.epoch, FREE).run()

    def say_arrived(self) -> None:
        """After rows were written."""
        signal_launch(self.flag_table, self.epoch, ARRIVED, self.rank).run()

    def wait_for_rows(self) -> None:
        """Before rows are read: every rank has written all of its own."""
        wait_launch(self.flags, self.epoch, ARRIVED).run()

    def release(self) -> None:
        """After rows were read: the exchange has ended."""
        if _settings["poison"]:
            self.buffer.view(torch.float32).fill_(float("nan"))
        signal_launch(self.flag_table, self.epoch, FREE, self.rank).run()


class Layout(NamedTuple):
    """Where things are in a buffer of `rows` rows, in bytes from its start: rows, then values, then origins."""

    rows: int
    width: int
    dtype: torch.dtype
    values: torch.dtype

    @property
    def values_at(self) -> int:
        """Where the values begin."""
        return _aligned(self.rows * self.width * self.dtype.itemsize)

    @property
    def origins_at(self) -> int:
        """Where the origins begin."""
        return self.values_at + _aligned(self.rows * self.values.itemsize)

    @property
    def bytes(self) -> int:
        """How large it is."""
        return self.origins_at + _aligned(self.rows * 4)

    def views(self, buffer: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(rows [N, D], values [N], origins [N]) of a buffer of bytes."""
        n = self.rows
        rows = buffer[: n * self.width * self.dtype.itemsize].view(self.dtype).reshape(n, self.width)
        values = buffer[self.values_at :][: n * self.values.itemsize].view(self.values)
        return rows, values, buffer[self.origins_at :][: n * 4].view(torch.int32)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


class Put(NamedTuple):
    """One rank's part in a dispatch: x [T, D] and the values [R] of the slots, if any, into buffers of N rows."""

    channel: Channel
    layout: Layout
    x: Tensor
    values: Tensor | None
    destination: Tensor
    offsets: Tensor
    counts: Tensor

    def write(self) -> None:
        """Rows to the ranks of their experts."""
        at = (self.layout.values_at, self.layout.origins_at)
        tensors = (self.x, self.values, self.destination, self.counts, self.channel.table)
        if self.x.numel():
            direct_rows.put_rows_launch(*tensors, at, self.layout.rows).run()

    def read(self) -> tuple[Tensor, Tensor, Tensor]:
        """What has arrived here: (rows [N, D], values [N], origins [N]), the last two empty without values."""
        rows, values, origins = self.layout.views(self.channel.buffer)
        out, count = torch.empty_like(rows), 0 if self.values is None else self.layout.rows
        found = values.new_empty(count), origins.new_empty(count)
        extra = None if self.values is None else (values, origins, *found)
        direct_rows.take_rows_launch(rows, self.offsets, out, extra).run()
        return out, *found


class Take(NamedTuple):
    """One rank's part in a return: y [N, D] and values [N], if any, to buffers with a place for each of R slots."""

    channel: Channel
    layout: Layout
    y: Tensor
    values: Tensor | None
    origin: Tensor
    destination: Tensor
    offsets: Tensor
    top_k: int

    def write(self) -> None:
        """Rows to the slots they came from."""
        tensors = (self.y, self.values, self.origin, self.offsets, self.channel.table)
        direct_rows.send_back_launch(*tensors, self.layout.values_at, self.layout.rows).run()

    def read(self) -> tuple[Tensor, Tensor]:
        """(sums [T, D], values [T, K], empty without values) of what has come back."""
        slots, values, _ = self.layout.views(self.channel.buffer)
        tokens = self.layout.rows // self.top_k
        out = slots.new_empty(tokens, slots.shape[1])
        found = values.new_empty(0 if self.values is None else tokens, self.top_k)
        extra = None if self.values is None else (values, found)
        if out.numel():
            direct_rows.sum_slots_launch(slots, self.destination, out, extra).run()
        return out, found


def _exchange(channel: Channel, write: Callable[[], None], read: Callable[[], Any]) -> Any:
    channel.wait_until_free()
    write()
    channel.say_arrived()
    channel.wait_for_rows()
    found = read()
    channel.release()
    return found


def channel_of(group: str, direction: str, device: torch.device, size: int) -> Channel:
    """The channel of a named group, with a buffer of at least `size` bytes. All ranks of the group call it together.

    Raises RunError where the ranks cannot map each other's memory.
    """
    key = (group, direction, device)
    known = _channels.get(key)
    if known is not None and known.buffer.numel() >= size:
        return known
    try:
        ranks = resolve_process_group(group)
        torch.cuda.synchronize(device)
        if known is not None:
            dist.barrier(ranks)  # nobody writes to, or waits on, what is about to go
        buffer, table, handle = symmetric_memory(_aligned(size), ranks, device)
        flags, flag_table, flag_handle = symmetric_memory(4 * 2 * ranks.size(), ranks, device)
        flags.zero_()
        torch.cuda.synchronize(device)
        dist.barrier(ranks)
    except (RuntimeError, NotImplementedError) as error:
        raise RunError(
            f"layout.transport direct needs ranks that can write to each other's memory over NVLink; those of group "
            f"{group!r} cannot here ({_first_line(error)}): use layout.transport=padded"
        ) from error
    addresses = [torch.tensor(each, dtype=torch.int64, device=device) for each in (table, flag_table)]
    epoch = torch.zeros(1, dtype=torch.int32, device=device)
    matrix = flags.view(torch.int32).reshape(2, -1)
    made = Channel(ranks.rank(), buffer, addresses[0], matrix, addresses[1], epoch, [handle, flag_handle])
    _channels[key] = made
    return made


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def forget_channels() -> None:
    """Drops every channel: its group has ended, and this rank has finished its exchanges."""
    _channels.clear()


def put(
    x: Tensor,
    weights: Tensor | None,
    destination: Tensor,
    offsets: Tensor,
    counts: Tensor,
    capacity: int,
    group: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """`direct_dispatch` on CUDA: rows [N, D], values [N] and origins [N]; without weights the last two are empty."""
    layout = Layout(capacity, x.shape[1], x.dtype, torch.float32 if weights is None else weights.dtype)
    channel = channel_of(group, "out", x.device, layout.bytes)
    values = None if weights is None else weights.reshape(-1)
    part = Put(channel, layout, x, values, destination, offsets, counts)
    found: tuple[Tensor, Tensor, Tensor] = _exchange(channel, part.write, part.read)
    return found


def take(
    y: Tensor,
    values: Tensor | None,
    origin: Tensor,
    destination: Tensor,
    offsets: Tensor,
    top_k: int,
    group: str,
) -> tuple[Tensor, Tensor]:
    """`direct_return` on CUDA: sums [T, D] and values [T, K]; without values the last is empty."""
    layout = Layout(destination.shape[0], y.shape[1], y.dtype, torch.float32 if values is None else values.dtype)
    channel = channel_of(group, "home", y.device, layout.bytes)
    part = Take(channel, layout, y, values, origin, destination, offsets, top_k)
    found: tuple[Tensor, Tensor] = _exchange(channel, part.write, part.read)
    return found
