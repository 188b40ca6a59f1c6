"""How long a rank's kernels send rows to other ranks and receive them, and how much of that nothing else hides.

These are NCCL's sends and receives (with pipelines those of hidden states too, never the reductions at a step's end),
and the kernels of transport `direct`, which also permute and sum rows. Their time includes waiting for other ranks.
Exposed is what is left after taking away every moment in which another kernel ran.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

Span = tuple[float, float]
_TALKS = re.compile(
    r"nccl.*(SendRecv|AllToAll)|put_rows|take_rows|send_back|sum_slots|signal_kernel|wait_kernel", re.IGNORECASE
)


@dataclass(frozen=True)
class Communication:
    """Milliseconds of kernels that communicate, and of those during which nothing else ran."""

    milliseconds: float
    exposed_milliseconds: float


def measure_communication(job: Callable[[], object]) -> Communication:
    """Runs `job` once under torch's profiler; on CUDA only. All ranks run it together."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        if dist.is_initialized():
            dist.barrier()  # a profiler takes its time to start: no rank shall wait for another's
        torch.cuda.synchronize()
        job()
        torch.cuda.synchronize()
    talking: list[Span] = []
    working: list[Span] = []
    for event in profiler.events() or ():
        if event.device_type != DeviceType.CUDA or event.is_user_annotation:
            continue
        span = (event.time_range.start / 1e3, event.time_range.end / 1e3)
        (talking if _TALKS.search(event.name) else working).append(span)
    return Communication(total(talking), uncovered(talking, working))


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
