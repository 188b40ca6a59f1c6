"""Times of jobs that run in turn, and what one run leaves allocated.

On a CUDA device time is the device's, between two events. Every turn runs each job once without counting it, so that
the host is ahead of the device and the job before has left the caches, and then a few times in a row. The clock settles
only under load: before the first turn all jobs run in turn for `WARM_SECONDS`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Job = Callable[[int], Any]  # called with a count, by which it takes its inputs in rotation
Outputs = tuple[Tensor, ...]
Guard = Callable[[str], AbstractContextManager[object]]
WARM_SECONDS = 0.4


def synchronize(device: torch.device) -> None:
    """Waits for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(job: Job, count: int, device: torch.device) -> Callable[[], float]:
    """Runs the job; its seconds can be asked for once the device has been waited for."""
    if device.type != "cuda":
        began = time.perf_counter()
        job(count)
        seconds = time.perf_counter() - began
        return lambda: seconds
    event: Callable[..., torch.cuda.Event] = torch.cuda.Event  # untyped in torch
    start, end = event(enable_timing=True), event(enable_timing=True)
    start.record()
    job(count)
    end.record()
    return lambda: start.elapsed_time(end) / 1e3


def time_in_turn(
    jobs: Mapping[str, Job],
    device: torch.device,
    *,
    repeats: int,
    in_a_row: int = 3,
    warm_seconds: float = WARM_SECONDS,
    guard: Guard = lambda name: nullcontext(),
) -> dict[str, list[float]]:
    """Seconds of every counted run of each job: `repeats` turns of `in_a_row`.

    `guard(name)` surrounds every run of that job; a job whose run it swallows an exception of is left out from then on.
    """
    alive = dict(jobs)
    found: dict[str, list[float]] = {name: [] for name in jobs}

    def turn(number: int, counted: int) -> None:
        pending: list[tuple[str, Callable[[], float]]] = []
        for name, job in list(alive.items()):
            done = False
            with guard(name):
                job(number * (counted + 1))
                for again in range(counted):
                    count = number * (counted + 1) + again + 1
                    pending.append((name, timed(job, count, device)))
                done = True
            if not done:
                del alive[name]
        synchronize(device)
        for name, seconds in pending:
            found[name].append(seconds())

    began, number = time.perf_counter(), 0
    while number == 0 or time.perf_counter() - began < warm_seconds:
        turn(number, 0)
        number += 1
    for number in range(repeats):
        turn(number, in_a_row)
    return {name: found[name] for name in alive}


@dataclass(frozen=True)
class Ceilings:
    """What this device does at most: a dense product [n, n] · [n, n] and a copy, as jobs and as what they do."""

    size: int
    copied_bytes: int
    dense: Job
    copy: Job

    @property
    def dense_name(self) -> str:
        """The name of the product's row."""
        return f"dense {self.size}³"

    def dense_rate(self, device: torch.device, **options: Any) -> float:
        """Operations per second of the product alone, median."""
        times = time_in_turn({"dense": self.dense}, device, repeats=5, **options)
        return self.operations / statistics.median(times["dense"])

    @property
    def operations(self) -> int:
        """Operations of the product."""
        return 2 * self.size**3


def make_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """8192³ and a gibibyte on CUDA, small ones elsewhere. Bytes copied count twice: read and written."""
    size, length = (8192, 1 << 30) if device.type == "cuda" else (256, 1 << 20)
    generator = torch.Generator(device).manual_seed(3)
    a, b = (torch.randn(size, size, dtype=dtype, device=device, generator=generator) for _ in range(2))
    source = torch.randint(0, 256, (length,), dtype=torch.uint8, device=device, generator=generator)
    target = torch.empty_like(source)
    return Ceilings(size, 2 * length, lambda _: torch.mm(a, b), lambda _: target.copy_(source))


@dataclass(frozen=True)
class Memory:
    """Bytes a run takes beside inputs and weights: `saved` between forward and backward, without the output; `peak`
    over both, without the gradients it returns. None where the device does not tell."""

    saved: int | None = None
    peak: int | None = None


def measure_memory(
    forward: Callable[[], Outputs], backward: Callable[[Outputs], list[Tensor]], device: torch.device
) -> Memory:
    """Runs forward and backward once; both have run before, so that nothing is allocated for the first time."""
    if device.type != "cuda":
        return Memory()
    synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    outputs = forward()
    synchronize(device)
    saved = torch.cuda.memory_allocated(device) - before - sum(out.nbytes for out in outputs)
    grads = backward(outputs)
    synchronize(device)
    returned = sum(grad.nbytes for grad in grads)
    return Memory(saved, torch.cuda.max_memory_allocated(device) - before - returned)


def graphed(job: Job, sets: int, pool: Any) -> Job:
    """A job that replays a CUDA graph of `job`, one captured for each of its `sets` input sets; results are dropped.

    All captures share `pool`, so each replay may write where another one did: only its time means anything.
    """
    make: Callable[[], torch.cuda.Stream] = torch.cuda.Stream  # untyped in torch
    stream = make()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for index in range(sets):
            job(index)
    torch.cuda.current_stream().wait_stream(stream)
    graphs = []
    for index in range(sets):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            job(index)
        graphs.append(graph)
    return lambda count: graphs[count % sets].replay()
