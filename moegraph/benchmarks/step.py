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

from moegraph.benchmarks.device_profile import KernelTime, profile_device
from moegraph.data.loader import StepBatch
from moegraph.errors import RunError
from moegraph.runtime.accounting import count_parameters, flops_per_token
from moegraph.runtime.device import choose_device, device_name, peak_memory
from moegraph.runtime.engine import Engine
from moegraph.runtime.mesh import join
from moegraph.specs.schema import Spec


@dataclass(frozen=True)
class StepTiming:
    """A whole training step: milliseconds (median and least), tokens per second of all ranks, 10¹² operations per
    second and peak bytes of one. `optimizer_milliseconds` are of the norm, the agreement of the ranks, AdamW and the
    weights sent round; the floor is the least bytes of it at the rate of a copy. Communication is that of rank 0 in the
    forward and backward of one block with experts on one micro-batch, on several GPUs. `overlap_seconds` are of a
    step's forward and backward, where `auto` measured them; so are, under the profiler and on a GPU, the milliseconds
    in which a kernel ran and in which none did, and the time of each kernel."""

    device: str
    ranks: int
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
    optimizer_milliseconds: float
    optimizer_floor_milliseconds: float
    communication_milliseconds: float | None
    exposed_milliseconds: float | None
    overlap_seconds: dict[str, float]
    busy_milliseconds: float | None
    idle_milliseconds: float | None
    kernels: tuple[KernelTime, ...]

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


def time_step(spec: Spec, steps: int, rank: int = 0, world: int = 1) -> StepTiming:
    """Times `steps` optimizer steps of a spec, as one rank of its layout, after a first one that compiles."""
    device = choose_device(spec.train.device)
    with join(spec.layout, rank, world, device) as mesh:
        return _time(spec, steps, Engine(spec, device, mesh))


def _time(spec: Spec, steps: int, engine: Engine) -> StepTiming:
    device, program = engine.device, engine.program
    generator = torch.Generator().manual_seed(spec.train.seed)
    losses: list[float] = []
    optimizer: list[float] = []

    def step() -> None:
        computed = engine.computer.compute(random_batch(spec, generator))
        _synchronize(device)
        began = time.perf_counter()
        agreed = engine.agree(computed)
        engine.commit(agreed, spec.train.optimizer.lr)
        _synchronize(device)
        optimizer.append(time.perf_counter() - began)
        losses.append(agreed.loss)
        if agreed.overflow:
            raise RunError(
                f"{agreed.overflow} rows found no place at capacity {engine.capacity}: raise layout.capacity"
            )

    def first_step() -> None:
        engine.commit(engine.compute(random_batch(spec, generator)), spec.train.optimizer.lr)

    first = _seconds(first_step, device)
    engine.decide_overlap(random_batch(spec, generator))
    times = [_seconds(step, device) for _ in range(steps)]
    median = statistics.median(times)
    total, active = count_parameters(program)
    rate = spec.train.tokens_per_step / median
    bytes_moved = optimizer_bytes(engine)
    seen = None
    if device.type == "cuda":
        batch = random_batch(spec, generator)
        seen = profile_device(lambda: engine.computer.compute(batch))
    talk = seen if engine.mesh.world > 1 else None
    mine = [place for place in engine.moe_blocks if program.instances[place].stage in engine.stages]
    passes = max(len(mine), 1) * spec.layout.microbatches
    return StepTiming(
        device=device_name(device),
        ranks=engine.mesh.world,
        parameters=total,
        active_parameters=active,
        first_seconds=first,
        milliseconds=median * 1e3,
        least_milliseconds=min(times) * 1e3,
        tokens_per_second=rate,
        tflops=rate * flops_per_token(spec, program) / 1e12 / engine.mesh.world,
        peak_bytes=peak_memory(device),
        loss=losses[-1],
        compilations=max(engine.compilations().values(), default=0),
        optimizer_milliseconds=statistics.median(optimizer) * 1e3,
        optimizer_floor_milliseconds=bytes_moved / copy_rate(device) * 1e3,
        communication_milliseconds=talk.milliseconds / passes if talk else None,
        exposed_milliseconds=talk.exposed_milliseconds / passes if talk else None,
        overlap_seconds=engine.overlap_seconds,
        busy_milliseconds=seen.busy_milliseconds if seen else None,
        idle_milliseconds=seen.idle_milliseconds if seen else None,
        kernels=seen.kernels if seen else (),
    )


def optimizer_bytes(engine: Engine) -> int:
    """The least bytes that norm, AdamW and the weights in compute dtype read and write on this rank.

    Gradients are read for the norm and again; master and both moments are read and written; the weights that the graphs
    read are written, on every replica whole.
    """
    optimizer, gradients = engine.state.optimizer, engine.gradients.shard
    held = sum(g.numel() * g.element_size() for g in gradients.values())
    moved = 2 * held
    for tensors in (optimizer.masters, optimizer.exp_avg, optimizer.exp_avg_sq):
        moved += 2 * tensors.flat.numel() * tensors.flat.element_size()
    own = {tensor.data_ptr() for tensor in optimizer.masters.values()}
    written = [engine.state.values[p.name] for family in engine.state.families for p in family.parameters]
    return moved + sum(value.numel() * value.element_size() for value in written if value.data_ptr() not in own)


def copy_rate(device: torch.device, size: int = 1 << 28) -> float:
    """Bytes read and written per second by copying a buffer, the median of ten."""
    size = size if device.type == "cuda" else size >> 4
    source = torch.ones(size, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    times = [_seconds(lambda: target.copy_(source), device) for _ in range(11)][1:]
    return 2 * source.numel() * source.element_size() / statistics.median(times)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _seconds(job: Callable[[], Any], device: torch.device) -> float:
    _synchronize(device)
    began = time.perf_counter()
    job()
    _synchronize(device)
    return time.perf_counter() - began
