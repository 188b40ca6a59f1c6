"""The quantising operators are all timed, beside a copy."""

from __future__ import annotations

import torch

from moegraph.benchmarks.quantize import time_quantize


def test_every_operator_on_ragged_rows_has_a_rate() -> None:
    rates = time_quantize(torch.device("cpu"), rows=64, columns=32, num_experts=2, repeats=1)
    assert set(rates) == {
        "copy",
        *(f"mx {axes}{form}" for axes in ("rows", "columns", "both") for form in ("", ", swizzled")),
        "fp8 rows",
        "fp8 columns, transposed",
    }
    assert all(rate > 0 for rate in rates.values())
