"""`time_layer`: moegraph's block with experts beside other ways to run it, a dense product and a copy.

    1. each row's block is set up, run once and compared with float64, alone on the device
    2. all are set up; each runs once per input set; what one run leaves allocated; agreement with moegraph's own row
    3. every job in turn (`timing.time_in_turn`), the dense product alone before and after

A row that fails is reported and left out; the others go on.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from moegraph.benchmarks import floors
from moegraph.benchmarks.blocks import Block, Fused, Routed, Separate
from moegraph.benchmarks.candidate import Candidate
from moegraph.benchmarks.inputs import Inputs, experts_with_rows, make_inputs, make_weights
from moegraph.benchmarks.low_precision import Fp8, Fp8Wgrad
from moegraph.benchmarks.mxfp8_block import Mxfp8
from moegraph.benchmarks.reference import Result, largest_difference, measure_errors, reference_bytes
from moegraph.benchmarks.results import LayerReport, Timing
from moegraph.benchmarks.shapes import Shape
from moegraph.benchmarks.timing import WARM_SECONDS, Job, graphed, make_ceilings, measure_memory, time_in_turn
from moegraph.runtime.device import choose_device, device_name

GRAPH = ", CUDA graph"
PASSES = ("forward", "forward_backward")
PRECISIONS: dict[str, type[Fp8]] = {block.name: block for block in (Fp8, Fp8Wgrad, Mxfp8)}
Report = Callable[[str], None]


def time_layer(
    shape: Shape,
    *,
    backward: bool = False,
    repeats: int = 15,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | None = None,
    peers: Sequence[type[Any]] = (),
    router: bool = False,
    compiled: bool | None = None,
    graph: bool = False,
    error: bool = True,
    precisions: Sequence[str] = (),
    report: Report = lambda text: None,
) -> LayerReport:
    """Times one block given router logits [T, E]: fused, as separate operators, and `peers`, with the ceilings.

    Weights and x are of `dtype`, logits float32. `router` adds a row with router product and losses, `compiled` (by
    default on CUDA) runs moegraph's blocks through torch.compile, `graph` adds rows replayed as CUDA graphs (CUDA
    only), `error` compares every row with float64. `precisions` adds rows of `PRECISIONS` and times what
    they quantise alone; x and the weights must be bf16. `report` gets a line before what can take minutes.
    """
    device = choose_device("cuda") if device is None else device
    _free(device)
    torch.compiler.reset()
    torch.manual_seed(0)
    compiled = device.type == "cuda" if compiled is None else compiled
    warm = WARM_SECONDS if device.type == "cuda" else 0.0
    blocks: list[type[Block]] = [
        Fused,
        Separate,
        *([Routed] if router else []),
        *[PRECISIONS[name] for name in precisions],
    ]
    makers: dict[str, Callable[[], Any]] = {block.name: partial(block, compiled=compiled) for block in blocks}
    makers |= {peer.name: peer for peer in peers}
    ceilings = make_ceilings(device, dtype)
    found = LayerReport(
        shape, device_name(device), torch.__version__, str(dtype).removeprefix("torch."), compiled, ceilings.dense_name
    )
    inputs = make_inputs(shape, dtype, device)
    used = experts_with_rows(shape, inputs)
    run = _Run(found, device, make_weights(shape, dtype, device), inputs, makers, report)
    if error:
        run.compare_with_float64()
    jobs = run.prepare(backward, graph)
    found.dense_rate_before = ceilings.dense_rate(device, warm_seconds=warm)
    casts = run.casts(jobs)
    times = time_in_turn(
        {found.dense: ceilings.dense, **jobs, **casts, "copy": ceilings.copy},
        device,
        repeats=repeats,
        warm_seconds=warm,
        guard=lambda key: run.guard(key.split("|")[0]),
    )
    found.dense_rate_after = ceilings.dense_rate(device, warm_seconds=warm)
    found.dense_rate = ceilings.operations / median(times[found.dense])
    found.copy_bytes_per_second = ceilings.copied_bytes / median(times["copy"])
    functions = (floors.forward_bytes, floors.forward_backward_bytes)
    found.floor_bytes = {name: each(shape, dtype.itemsize, used) for name, each in zip(PASSES, functions, strict=True)}
    found.row(found.dense).forward = Timing.of(times[found.dense], ceilings.operations, found.dense_rate)
    for key in jobs.keys() & times.keys():
        name, which = key.split("|")
        work = shape.operations * (1 if which == "forward" else 3)
        floor = found.floor_bytes[which] / found.copy_bytes_per_second
        setattr(found.row(name), which, Timing.of(times[key], work, found.dense_rate, floor))
    for key in casts.keys() & times.keys():
        name, which, _ = key.split("|")
        setattr(found.row(name), f"{which}_cast", Timing.of(times[key]))
    found.row("copy").forward = Timing.of(times["copy"])
    order = [*dict.fromkeys(key.split("|")[0] for key in jobs), found.dense, "copy"]
    found.rows = {name: found.rows[name] for name in [*order, *found.rows] if name in found.rows}
    return found


@dataclass
class _Run:
    """One shape's weights, inputs and blocks while it is measured."""

    found: LayerReport
    device: torch.device
    weights: tuple[Tensor, Tensor]
    inputs: list[Inputs]
    makers: dict[str, Callable[[], Any]]
    report: Report
    candidates: dict[str, Candidate] = field(default_factory=dict)
    reported: set[str] = field(default_factory=set)

    @contextmanager
    def guard(self, name: str) -> Iterator[None]:
        """Swallows what a row raises and says so."""
        try:
            yield
        except (Exception, SystemExit) as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            self.found.failed[name] = {"reason": reason, "traceback": traceback.format_exc()}
            self.report(f"{name} failed: {reason}")

    def make(self, name: str, shape: Shape) -> Candidate:
        """A block of that name set up for the shape."""
        first = name not in self.reported
        self.report(
            f"{name}: " + ("set-up and first run; kernels may tune for minutes" if first else "made to be timed")
        )
        self.reported.add(name)
        return Candidate(self.makers[name](), shape, *self.weights)

    def compare_with_float64(self) -> None:
        """Fills in every row's errors, at the full shape or as many of its tokens as fit beside float64."""
        shape = self.found.shape
        while shape.tokens > 256 and not self._fits(shape):
            shape = replace(shape, tokens=shape.tokens // 2)
        self.found.error_tokens = shape.tokens
        inputs = self.inputs[0] if shape == self.found.shape else self.inputs[0].first(shape.tokens)
        for name in self.makers:
            with self.guard(name):
                self._compare(name, shape, inputs)
            _free(self.device)

    def _compare(self, name: str, shape: Shape, inputs: Inputs) -> None:
        candidate = self.make(name, shape)
        if not candidate.is_block:
            return
        router, have = candidate.router(inputs), candidate.run(inputs)
        errors = measure_errors(have, inputs, *self.weights, shape.top_k, router)
        row = self.found.row(name)
        row.low_precision = isinstance(candidate.block, Fp8)
        row.error, row.worst_tile = errors.relative, errors.worst_tile

    def _fits(self, shape: Shape) -> bool:
        if self.device.type != "cuda":
            return True
        unused = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return reference_bytes(shape, self.inputs[0].x.itemsize) < torch.cuda.mem_get_info(self.device)[0] + unused

    def prepare(self, backward: bool, graph: bool) -> dict[str, Job]:
        """Sets up every row that has not failed, runs it, measures its memory; `row|pass` → what is timed."""
        for name in self.makers:
            if name not in self.found.failed:
                with self.guard(name):
                    self.candidates[name] = self.make(name, self.found.shape)
        jobs: dict[str, Job] = {}
        base: Result | None = None
        pool = torch.cuda.graph_pool_handle() if graph else None
        for name, candidate in list(self.candidates.items()):
            wanted: dict[str, Job] = {}
            with self.guard(name):  # set-ups may reset compilers: the first runs come after all of them
                wanted = candidate.jobs(self.inputs, backward)
                for job in wanted.values():
                    for count in range(len(self.inputs)):
                        job(count)
                if candidate.is_block:
                    base = self._examine(name, candidate, base, backward)
            _free(self.device)
            if name in self.found.failed:
                del self.candidates[name]
                continue
            jobs |= {f"{name}|{which}": job for which, job in wanted.items()}
            if graph and isinstance(candidate.block, Block):
                for which, job in wanted.items():
                    with self.guard(name + GRAPH):
                        jobs[f"{name}{GRAPH}|{which}"] = graphed(job, len(self.inputs), pool)
        return jobs

    def casts(self, jobs: Mapping[str, Job]) -> dict[str, Job]:
        """`row|pass|cast` → what a row of low precision quantises in that pass, alone."""
        found: dict[str, Job] = {}
        for name, candidate in self.candidates.items():
            if isinstance(candidate.block, Fp8):
                with self.guard(name):
                    made = candidate.block.casts(self.inputs[0])
                    found |= {f"{name}|{which}|cast": job for which, job in made.items() if f"{name}|{which}" in jobs}
        return found

    def _examine(self, name: str, candidate: Candidate, base: Result | None, backward: bool) -> Result | None:
        """Memory of one run, and agreement with `base`, the result of moegraph's own row, which it returns."""
        row, inputs = self.found.row(name), self.inputs[0]
        row.low_precision = isinstance(candidate.block, Fp8)
        if backward and candidate.has_backward:
            memory = measure_memory(
                lambda: candidate.outputs(inputs), lambda outputs: candidate.gradients(inputs, outputs), self.device
            )
            row.saved_bytes, row.peak_bytes = memory.saved, memory.peak
        if isinstance(candidate.block, Fused):
            return candidate.run(inputs)
        if base is not None and not isinstance(candidate.block, Routed):
            row.agreement = largest_difference(candidate.run(inputs), base)
        return base


def _free(device: torch.device) -> None:
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
