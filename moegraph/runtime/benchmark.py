"""Timing: a whole training step of a spec, and one mixture-of-experts block, on this device with random inputs.

Medians of steps after the first, each ended by a synchronisation; what is compared is timed in turn, in one run,
because a card's clock moves with its temperature and power. Never zeros: they run faster than real values.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from moegraph import ops
from moegraph.compiled import compile
from moegraph.data.loader import StepBatch
from moegraph.runtime.accounting import count_parameters, flops_per_token
from moegraph.runtime.device import choose_device, device_name, peak_memory
from moegraph.runtime.executor import Executor
from moegraph.runtime.gradient_norm import global_norm
from moegraph.runtime.gradients import GradientBuffers
from moegraph.runtime.model_state import ModelState, master_dtype
from moegraph.runtime.step import StepComputer
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
    program = compile(spec).program
    state = ModelState(spec, program, device)
    executor = Executor(program, state.values, device, spec.train.compile)
    gradients = GradientBuffers(program.trained(), master_dtype(spec), device)
    computer = StepComputer(spec, executor, gradients, device)
    generator = torch.Generator().manual_seed(spec.train.seed)

    def step() -> float:
        computed = computer.compute(random_batch(spec, generator))
        numbers = torch.stack([computed.loss.double(), global_norm(gradients)]).tolist()
        state.commit(gradients, numbers[1], spec.train.optimizer.lr, computed.expert_counts)
        return float(numbers[0])

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
        compilations=max(executor.compilations().values(), default=0),
    )


@dataclass(frozen=True)
class LayerTiming:
    """One way to run a block: median milliseconds, 10¹² operations per second, and that over a dense product's."""

    name: str
    milliseconds: float
    tflops: float
    share_of_dense: float


def time_layer(
    *, tokens: int, d_model: int, d_ff: int, experts: int, top_k: int, skew: float, backward: bool, repeats: int
) -> list[LayerTiming]:
    """Times the experts of one block given random router logits: as one fused operator, and as separate ones.

    Operations counted: 6 · tokens · top_k · d_model · d_ff forward, three times that with backward. `skew` is the
    standard deviation of a bias per expert. bf16, needs a CUDA device. The last row is a dense 8192³ product.
    """
    torch.manual_seed(0)
    device = choose_device("cuda")
    logits = torch.randn(tokens, experts, device=device) + skew * torch.randn(experts, device=device)
    weights, ids = ops.route(logits, None, score="softmax", top_k=top_k, norm_kind="sum")
    x, w_up, w_down, grad = (
        torch.randn(shape, device=device).to(torch.bfloat16) * scale
        for shape, scale in (
            ((tokens, d_model), 1.0),
            ((experts, 2 * d_ff, d_model), d_model**-0.5),
            ((experts, d_model, d_ff), d_ff**-0.5),
            ((tokens, d_model), 1.0),
        )
    )
    leaves = [t.requires_grad_(backward) for t in (x, weights.detach(), w_up, w_down)]

    def run(block: Callable[..., Tensor]) -> Callable[[], None]:
        def once() -> None:
            out = block(*leaves, ids, experts, top_k)
            if backward:
                torch.autograd.grad(out, leaves, grad)

        return once

    dense = [torch.randn(8192, 8192, device=device).to(torch.bfloat16) for _ in range(2)]
    jobs = {"fused": run(_fused), "separate": run(_separate), "dense 8192³": lambda: torch.mm(*dense)}
    times = _interleaved(list(jobs.values()), repeats, device)
    work = 6 * tokens * top_k * d_model * d_ff * (3 if backward else 1)
    rates = [w / t / 1e12 for w, t in zip((work, work, 2 * 8192**3), times, strict=True)]
    rows = zip(jobs, times, rates, strict=True)
    return [LayerTiming(name, t * 1e3, rate, rate / rates[-1]) for name, t, rate in rows]


def _fused(x: Tensor, weights: Tensor, w_up: Tensor, w_down: Tensor, ids: Tensor, experts: int, top_k: int) -> Tensor:
    metadata = ops.sort_by_expert(ids, experts)
    row_weight = ops.gather_weights(weights, *metadata)
    y, _ = ops.expert_ffn(x, *metadata, row_weight, w_up, w_down, top_k=top_k)
    return ops.combine(y, *metadata, top_k=top_k)


def _separate(
    x: Tensor, weights: Tensor, w_up: Tensor, w_down: Tensor, ids: Tensor, experts: int, top_k: int
) -> Tensor:
    metadata = ops.sort_by_expert(ids, experts)
    row_weight = ops.gather_weights(weights, *metadata)
    rows = ops.permute(x, *metadata, top_k=top_k)
    act = ops.swiglu(ops.grouped_mm(rows, w_up, metadata[2]))
    down = ops.grouped_mm(act, w_down, metadata[2])
    return ops.combine(ops.scale_rows(down, row_weight), *metadata, top_k=top_k)


def _interleaved(jobs: Sequence[Callable[[], Any]], repeats: int, device: torch.device) -> list[float]:
    """Median seconds of each job, timed in turn after two rounds that are not counted."""
    found: list[list[float]] = [[] for _ in jobs]
    for turn in range(repeats + 2):
        for job, times in zip(jobs, found, strict=True):
            seconds = _seconds(job, device)
            if turn >= 2:
                times.append(seconds)
    return [statistics.median(times) for times in found]


def _seconds(job: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    job()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began
