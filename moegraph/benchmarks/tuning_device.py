"""Grouped products on a CUDA device for the tuner: random inputs and routing, compiled, run and timed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from moegraph import ops
from moegraph.benchmarks.fp8_inputs import fp8_function
from moegraph.benchmarks.timing import synchronize, time_in_turn
from moegraph.benchmarks.tuner import TORCH, Rejected, Way
from moegraph.kernels.config import FP8, Config
from moegraph.kernels.shapes import Problem
from moegraph.ops.grouped_mm import torch_grouped_mm, torch_grouped_mm_dgrad, torch_grouped_mm_wgrad

WARM_SECONDS = 0.2
_IN_A_ROW = 2


class DeviceTrial:
    """A problem with inputs on a device: normal values, weights scaled by k^-½, experts chosen uniformly.

    Raises Rejected where the inputs do not fit in memory.
    """

    def __init__(self, problem: Problem, device: torch.device, capability: int, seed: int = 0) -> None:
        self._problem, self._device, self._capability = problem, device, capability
        self._generator = torch.Generator(device).manual_seed(seed)
        try:
            self._run, self._torch = self._functions()
        except torch.OutOfMemoryError as error:
            raise Rejected("its inputs do not fit in memory") from error

    def compile(self, config: Config) -> None:
        """Compiles a configuration for this chip and looks at what came out. Raises Rejected."""
        from moegraph.kernels.compiled import compile_launch
        from moegraph.kernels.products import product_launch

        try:
            report = compile_launch(product_launch(self._problem, config), self._capability)
        except Exception as error:  # of Triton, of its passes, of ptxas
            raise Rejected("failed") from error
        if report.spill_bytes:
            raise Rejected("spills")
        if not report.fits:
            raise Rejected("too large")

    def result(self, way: Way) -> tuple[Tensor, ...]:
        """What it computes. Raises Rejected where it cannot be launched."""
        try:
            found = self._job(way)()
            synchronize(self._device)
        except Exception as error:  # of Triton's launcher: out of shared or tensor memory
            raise Rejected("failed") from error
        return found if isinstance(found, tuple) else (found,)

    def milliseconds(self, ways: Sequence[Way], turns: int) -> list[float]:
        """The median time of each, in turn."""
        jobs = {str(i): partial(_once, self._job(way)) for i, way in enumerate(ways)}
        times = time_in_turn(jobs, self._device, repeats=turns, in_a_row=_IN_A_ROW, warm_seconds=WARM_SECONDS)
        return [1e3 * statistics.median(times[name]) for name in jobs]

    def _job(self, way: Way) -> Callable[[], Tensor | tuple[Tensor, ...]]:
        if isinstance(way, Config):
            return partial(self._run, config=way)
        assert way == TORCH
        assert self._torch is not None
        return self._torch

    def _normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        dtype = torch.bfloat16 if self._problem.dtype == FP8 else self._problem.dtype
        made = torch.randn(shape, dtype=dtype, device=self._device, generator=self._generator)
        return made.mul_(scale)

    def _routing(self) -> tuple[Tensor, Tensor, Tensor]:
        """(order [R], inverse [R], offsets [E]), int32, of a uniform choice of R / T distinct experts per token."""
        p = self._problem
        tokens = p.tokens or p.rows
        scores = torch.rand(tokens, p.experts, device=self._device, generator=self._generator)
        ids = scores.topk(p.rows // tokens, dim=-1).indices.to(torch.int32)
        return ops.sort_by_expert(ids, p.experts)

    def _functions(self) -> tuple[Callable[..., Tensor | tuple[Tensor, ...]], Callable[[], Tensor] | None]:
        """(moegraph's kernel, which takes a configuration; torch's, where there is one), on inputs."""
        from moegraph.kernels import dgrad_swiglu, rows_gemm, up_swiglu, wgrad

        p, scale = self._problem, self._problem.k**-0.5
        order, inverse, offsets = self._routing()
        if p.dtype == FP8:
            row_weight = torch.rand(p.rows, device=self._device, generator=self._generator)
            return fp8_function(p, self._normal, row_weight, offsets), None
        if p.kernel == "up_swiglu":
            x, weight = self._normal(p.tokens, p.k), self._normal(p.experts, 2 * p.n, p.k, scale=scale)
            function = partial(up_swiglu.up_swiglu, top_k=p.rows // p.tokens)
            return partial(function, x, order, inverse, weight, offsets), None
        if p.kernel == "dgrad_swiglu":
            grad, weight = self._normal(p.rows, p.k), self._normal(p.experts, p.k, p.n, scale=scale)
            z = self._normal(p.rows, 2 * p.n)
            row_weight = torch.rand(p.rows, device=self._device, generator=self._generator)
            return partial(dgrad_swiglu.dgrad_swiglu, grad, weight, z, row_weight, offsets), None
        if p.kernel == "wgrad":
            grad, rows = self._normal(p.rows, p.n), self._normal(p.rows, p.k)
            return (
                partial(wgrad.wgrad, grad, rows, offsets),
                partial(torch_grouped_mm_wgrad, grad, rows, offsets),
            )
        rows = self._normal(p.rows, p.k)
        if p.kernel == "grouped_mm_dgrad":
            weight = self._normal(p.experts, p.k, p.n, scale=scale)
            kernel = partial(rows_gemm.grouped_mm, rows, weight, offsets, transposed=True)
            return kernel, partial(torch_grouped_mm_dgrad, rows, weight, offsets)
        weight = self._normal(p.experts, p.n, p.k, scale=scale)
        kernel = partial(rows_gemm.grouped_mm, rows, weight, offsets)
        return kernel, partial(torch_grouped_mm, rows, weight, offsets)


def _once(job: Callable[[], object], count: int) -> None:
    job()
