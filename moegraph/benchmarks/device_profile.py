"""What a rank's kernels spend their time on, how long they send rows to other ranks and receive them, and how much of
that nothing else hides.

Those that communicate are NCCL's sends and receives (with pipelines those of hidden states too, never the reductions
at a step's end), and the kernels of transport `direct`, which also permute and sum rows. Their time includes waiting
for other ranks.
Exposed is what is left after taking away every moment in which another kernel ran.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

Span = tuple[float, float]
_TALKS = re.compile(
    r"nccl.*(SendRecv|AllToAll)|put_rows|take_rows|send_back|sum_slots|signal_kernel|wait_kernel", re.IGNORECASE
)


class KernelTime(NamedTuple):
    """A kernel by its name: milliseconds in all, and launches."""

    name: str
    milliseconds: float
    launches: int


@dataclass(frozen=True)
class DeviceProfile:
    """Milliseconds of kernels that communicate, of those during which nothing else ran, of all kernels, during which
    none ran between the first and the last, and of each kernel, the longest first."""

    milliseconds: float
    exposed_milliseconds: float
    busy_milliseconds: float
    idle_milliseconds: float
    kernels: tuple[KernelTime, ...]


def profile_device(job: Callable[[], object]) -> DeviceProfile:
    """Runs `job` once under torch's profiler; on CUDA only. All ranks run it together."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        if dist.is_initialized():
            dist.barrier()  # a profiler takes its time to start: no rank shall wait for another's
        torch.cuda.synchronize()
        job()
        torch.cuda.synchronize()
    talking: list[Span] = []
    working: list[Span] = []
    named: dict[str, list[float]] = {}
    for event in profiler.events() or ():
        if event.device_type != DeviceType.CUDA or event.is_user_annotation:
            continue
        span = (event.time_range.start / 1e3, event.time_range.end / 1e3)
        (talking if _TALKS.search(event.name) else working).append(span)
        named.setdefault(event.name, []).append(span[1] - span[0])
    kernels = sorted((KernelTime(name, sum(each), len(each)) for name, each in named.items()), key=lambda k: -k[1])
    spans = [*talking, *working]
    lasted = max((end for _, end in spans), default=0.0) - min((start for start, _ in spans), default=0.0)
    busy = total(spans)
    return DeviceProfile(total(talking), uncovered(talking, working), busy, lasted - busy, tuple(kernels))


def total(spans: Sequence[Span]) -> float:
    """How long at least one of the spans (start, end) lasts."""
    return sum(end - start for start, end in _merged(spans))


def uncovered(spans: Sequence[Span], cover: Sequence[Span]) -> float:
    """How long at least one of `spans` lasts and none of `cover`."""
    return total([*spans, *cover]) - total(cover)


def _merged(spans: Sequence[Span]) -> list[Span]:
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found
