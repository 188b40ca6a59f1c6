"""Timing whole training steps of a spec on this device with random tokens.

Medians of steps after the first, each ended by a synchronisation.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from moegraph.data.loader import StepBatch
from moegraph.runtime.accounting import count_parameters, flops_per_token
from moegraph.runtime.device import choose_device, device_name, peak_memory
from moegraph.runtime.engine import Engine
from moegraph.specs.schema import Spec


@dataclass(frozen=True)
class StepTiming:
    """A whole training step: milliseconds (median and least), tokens and 10¹² operations per second, peak bytes."""

    device: str
    parameters: int
    active_parameters: int
    first_seconds: float
    milliseconds: float
    least_milliseconds: float
    tokens_per_second: float
    tflops: float
    peak_bytes: int
    loss: float
    compilations: int

    def to_json(self) -> dict[str, Any]:
        """As JSON-able data."""
        return asdict(self)


def random_batch(spec: Spec, generator: torch.Generator) -> StepBatch:
    """Random tokens for one step; with document masks, four documents a row."""
    rows, length = spec.sequences_per_step, spec.data.seq_len
    tokens = torch.randint(0, spec.model.vocab_size, (rows, length + 1), generator=generator)
    places = torch.arange(length, dtype=torch.int32).repeat(rows, 1)
    part = max(length // 4, 1) if spec.data.document_mask else length
    positions, documents = places % part, places // part
    return StepBatch(
        tokens[:, :-1].contiguous(),
        tokens[:, 1:].contiguous(),
        positions.contiguous(),
        documents.contiguous(),
        torch.arange(rows),
        rows * length,
    )


def time_step(spec: Spec, steps: int) -> StepTiming:
    """Times `steps` optimizer steps of a spec after a first one that compiles."""
    device = choose_device(spec.train.device)
    engine = Engine(spec, device)
    program = engine.program
    generator = torch.Generator().manual_seed(spec.train.seed)

    def step() -> float:
        agreed = engine.compute(random_batch(spec, generator))
        engine.commit(agreed, spec.train.optimizer.lr)
        return agreed.loss

    first = _seconds(step, device)
    losses: list[float] = []
    times = [_seconds(lambda: losses.append(step()), device) for _ in range(steps)]
    median = statistics.median(times)
    total, active = count_parameters(program)
    rate = spec.train.tokens_per_step / median
    return StepTiming(
        device=device_name(device),
        parameters=total,
        active_parameters=active,
        first_seconds=first,
        milliseconds=median * 1e3,
        least_milliseconds=min(times) * 1e3,
        tokens_per_second=rate,
        tflops=rate * flops_per_token(spec, program) / 1e12,
        peak_bytes=peak_memory(device),
        loss=losses[-1],
        compilations=max(engine.compilations().values(), default=0),
    )


def _seconds(job: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    job()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began
