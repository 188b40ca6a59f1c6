"""How fast the quantising operators move memory on a device, beside a copy in the same run.

Bytes are those an operator has to read and write: x, data and scales, x twice for FP8 along columns.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from moegraph import ops
from moegraph.benchmarks.timing import make_ceilings, time_in_turn
from moegraph.kernels.config import Config

# Columns per program and warps. Fewer columns per warp: fewer registers, more instructions per element.
CONFIGS = tuple(Config(block_n=n, num_warps=warps) for n, warps in ((64, 1), (128, 1), (128, 2), (128, 4), (256, 2)))


def time_quantize(
    device: torch.device,
    *,
    rows: int = 131072,
    columns: int = 2048,
    num_experts: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    repeats: int = 5,
) -> dict[str, float]:
    """Gigabytes per second, read and written, of each operator on x [rows, columns] of about equal experts, and of
    `copy`, what this device does at most; medians. Rows past the last offset: none."""
    x, offsets = _rows(device, rows, columns, num_experts, dtype)
    calls: dict[str, tuple[int, Callable[[], tuple[Tensor, ...]]]] = {
        "mx rows": (1, lambda: ops.mx_quantize_rows(x, offsets)),
        "mx rows, swizzled": (1, lambda: ops.mx_quantize_rows(x, offsets, swizzled=True)),
        "mx columns": (1, lambda: ops.mx_quantize_ragged_columns(x, offsets)),
        "mx columns, swizzled": (1, lambda: ops.mx_quantize_ragged_columns(x, offsets, swizzled=True)),
        "mx both": (1, lambda: ops.mx_quantize_ragged_both(x, offsets)),
        "mx both, swizzled": (1, lambda: ops.mx_quantize_ragged_both(x, offsets, swizzled=True)),
        "fp8 rows": (1, lambda: ops.fp8_quantize_rows(x, offsets)),
        "fp8 columns, transposed": (2, lambda: ops.fp8_quantize_columns_t(x, offsets)),
    }

    jobs = {name: _job(call) for name, (_, call) in calls.items()}
    moved = {name: reads * x.nbytes + sum(out.nbytes for out in call()) for name, (reads, call) in calls.items()}
    return _rates(device, dtype, jobs, moved, repeats)


def sweep_quantize(
    device: torch.device,
    *,
    rows: int = 131072,
    columns: int = 2048,
    num_experts: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    configs: Sequence[Config] = CONFIGS,
    repeats: int = 3,
) -> dict[str, float]:
    """The same of the MXFP8 kernel with each of `configs`, scales swizzled. On CUDA only."""
    from moegraph.kernels.mx_quantize import empty_quantized, mx_quantize_launch
    from moegraph.kernels.tiles import tile_schedule

    x, offsets = _rows(device, rows, columns, num_experts, dtype)
    schedule = tile_schedule(offsets, rows, 128, tail=True)
    jobs: dict[str, Callable[[int], Any]] = {}
    moved: dict[str, int] = {}
    for axes, asked in {"rows": (True, False), "columns": (False, True), "both": (True, True)}.items():
        out = empty_quantized(x, num_experts, rows=asked[0], columns=asked[1], swizzled=True)
        for config in configs:
            name = f"mx {axes}, {config.block_n} columns, warps {config.num_warps}"
            jobs[name] = _job(mx_quantize_launch(x, out, offsets, schedule, swizzled=True, config=config).run)
            moved[name] = x.nbytes + sum(tensor.nbytes for tensor in out if tensor is not None)
    return _rates(device, dtype, jobs, moved, repeats)


def _rows(device: torch.device, rows: int, columns: int, num_experts: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(rows, columns, dtype=dtype, device=device, generator=generator)
    ends = torch.arange(1, num_experts + 1, dtype=torch.int64) * rows // num_experts
    return x, ends.to(torch.int32).to(device)


def _job(call: Callable[[], Any]) -> Callable[[int], Any]:
    return lambda _: call()


def _rates(
    device: torch.device,
    dtype: torch.dtype,
    jobs: Mapping[str, Callable[[int], Any]],
    moved: Mapping[str, int],
    repeats: int,
) -> dict[str, float]:
    ceilings = make_ceilings(device, dtype)
    times = time_in_turn({"copy": ceilings.copy, **jobs}, device, repeats=repeats)
    moved = {"copy": ceilings.copied_bytes, **moved}
    return {name: moved[name] / statistics.median(found) / 1e9 for name, found in times.items()}
