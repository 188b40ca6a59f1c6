"""Ranks that tell each other, on the device, how far they are: the host waits for nothing.

Each rank has flags [2, P] int32 that the others write: `flags[0, p]` is the last exchange for which rank p has written
its rows here, `flags[1, p]` the last one after which rank p has emptied its buffer. Each has an `epoch` of its own, the
number of exchanges it has finished. An exchange is then, in the order of one stream:

    wait(FREE, 0)       every buffer has been emptied after the exchange before
    … write rows into the buffers …
    signal(ARRIVED)     this rank has written all of them
    wait(ARRIVED, 1)    so have the others
    … take rows out of one's own buffer …
    signal(FREE)        it may be written again; the epoch goes up by one

Nothing is ever reset: numbers only grow, and are compared by their difference. `signal` writes with release at system
scope, and what kernels before it in the stream wrote happened before it; `wait` reads with acquire, and so happens
before what kernels after it read. All ranks make the same exchanges in the same order.

A rank that waits for one that died waits for ever; the collective that every exchange comes with (its counts) then runs
into its time limit and ends the process.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from moegraph.kernels.config import Config
from moegraph.kernels.launch import Launch

ARRIVED, FREE = 0, 1
_CONFIG = Config(num_warps=1)


@triton.jit
def signal_kernel(table_ptr, epoch_ptr, at, P: tl.constexpr, P_PAD: tl.constexpr, LAST: tl.constexpr):
    """One program: this rank's flag, `at` of each rank's flags, becomes the number of the exchange."""
    p = tl.arange(0, P_PAD)
    number = tl.load(epoch_ptr) + 1
    flags = tl.load(table_ptr + p, mask=p < P, other=0).to(epoch_ptr.dtype)
    tl.atomic_xchg(flags + at, tl.zeros_like(p) + number, mask=p < P, sem="release", scope="sys")
    if LAST:
        tl.debug_barrier()  # every thread has read the epoch
        tl.store(epoch_ptr, number)


@triton.jit
def wait_kernel(flags_ptr, epoch_ptr, AHEAD: tl.constexpr):
    """A program per rank: until its flag has come to the epoch + AHEAD."""
    flag = flags_ptr + tl.program_id(0)
    wanted = tl.load(epoch_ptr) + AHEAD
    seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    while seen - wanted < 0:
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")


def _lanes(ranks: int) -> int:
    return max(32, int(triton.next_power_of_2(ranks)))  # a thread for each, and no thread twice


def signal_launch(table: Tensor, epoch: Tensor, what: int, rank: int) -> Launch:
    """The launch by which `rank` says ARRIVED or FREE; `table` [P] int64 are the addresses of the ranks' flags."""
    ranks = table.shape[0]
    arguments = {"table_ptr": table, "epoch_ptr": epoch, "at": what * ranks + rank}
    return Launch(signal_kernel, (1,), arguments, {"P": ranks, "P_PAD": _lanes(ranks), "LAST": what == FREE}, _CONFIG)


def wait_launch(flags: Tensor, epoch: Tensor, what: int) -> Launch:
    """The launch that waits until every rank has said ARRIVED for this exchange, or FREE after the one before."""
    arguments = {"flags_ptr": flags[what], "epoch_ptr": epoch}
    return Launch(wait_kernel, (flags.shape[1],), arguments, {"AHEAD": int(what == ARRIVED)}, _CONFIG)
