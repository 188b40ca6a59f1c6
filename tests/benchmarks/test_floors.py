"""The byte floor is the sum of what each kernel of the fused design reads and writes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moegraph.benchmarks.floors import forward_backward_bytes, forward_bytes
from moegraph.benchmarks.shapes import PRESETS, Shape


@pytest.mark.parametrize(
    ("preset", "forward", "both"), [("A", 5.75, 16.25), ("C", 6.25, 17.5), ("D", 4.875, 13.375), ("Q", 12.0, 33.5)]
)
def test_floors_of_the_presets_in_gib(preset: str, forward: float, both: float) -> None:
    assert forward_bytes(PRESETS[preset], 2) / 2**30 == pytest.approx(forward)
    assert forward_backward_bytes(PRESETS[preset], 2) / 2**30 == pytest.approx(both)


def test_floors_add_up_kernel_by_kernel() -> None:
    tokens, d, f, experts, k = 6, 5, 3, 4, 2
    rows, up, down = tokens * k, experts * 2 * f * d, experts * f * d
    forward = [
        tokens * d + up + rows * 2 * f + rows * f,  # up projection: x, w_up → z, act
        rows * f + down + rows * d,  # down projection: act, w_down → y
        rows * d + tokens * d,  # combine: y → out
    ]
    backward = [
        tokens * d + down + rows * 2 * f + rows * 2 * f + rows * f,  # dgrad of down: grad, w_down, z → dz, act
        tokens * d + rows * f + down,  # wgrad of down: grad, act → dw_down
        rows * 2 * f + up + rows * d,  # dgrad of up: dz, w_up → rows of dx
        rows * d + tokens * d,  # sum → dx
        tokens * d + rows * 2 * f + up,  # wgrad of up: x, dz → dw_up
    ]
    shape = Shape(tokens, d, f, experts, k)
    assert forward_bytes(shape, 2) == 2 * sum(forward)
    assert forward_backward_bytes(shape, 4) == 4 * sum(forward + backward)


def test_weights_of_experts_without_rows_are_not_read_but_their_gradients_are_written() -> None:
    shape = replace(PRESETS["A"], tokens=2)
    one = 3 * shape.d_model * shape.d_ff * 2
    assert forward_bytes(shape, 2) - forward_bytes(shape, 2, 10) == 118 * one
    assert forward_backward_bytes(shape, 2) - forward_backward_bytes(shape, 2, 10) == 2 * 118 * one
