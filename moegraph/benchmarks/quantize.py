"""How fast the quantising operators move memory on a device, beside a copy in the same run.

Bytes are those an operator has to read and write: x, data and scales, x twice for FP8 along columns.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moegraph import ops
from moegraph.benchmarks.timing import make_ceilings, time_in_turn


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
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(rows, columns, dtype=dtype, device=device, generator=generator)
    ends = torch.arange(1, num_experts + 1, dtype=torch.int64) * rows // num_experts
    offsets = ends.to(torch.int32).to(device)
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

    def job(call: Callable[[], Any]) -> Callable[[int], Any]:
        return lambda _: call()

    ceilings = make_ceilings(device, dtype)
    moved = {name: reads * x.nbytes + sum(out.nbytes for out in call()) for name, (reads, call) in calls.items()}
    jobs = {name: job(call) for name, (_, call) in calls.items()}
    times = time_in_turn({"copy": ceilings.copy, **jobs}, device, repeats=repeats)
    moved["copy"] = ceilings.copied_bytes
    return {name: moved[name] / statistics.median(found) / 1e9 for name, found in times.items()}
