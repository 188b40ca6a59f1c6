"""Activations and gradients that are quantised as they are made, compiled for three chips without a GPU."""

from __future__ import annotations

import re

import pytest

from moegraph.kernels.catalogue import activation_launches
from moegraph.kernels.chips import CHIPS
from moegraph.kernels.compiled import build, compile_launch

KERNELS = dict(activation_launches(rows=65536, d_ff=2048, num_experts=32))
CLAMPED = dict(activation_launches(rows=65536, d_ff=2880, num_experts=32, clamped=True))
SLOW = pytest.mark.slow


# Every day each kernel for one of the chips.
CASES = [
    pytest.param(name, chip, marks=() if (place + which) % len(CHIPS) == 0 else SLOW)
    for place, name in enumerate(KERNELS)
    for which, chip in enumerate(CHIPS)
]


@pytest.mark.parametrize(("name", "capability"), CASES)
def test_it_does_not_spill_and_rounds_by_the_chip(name: str, capability: int) -> None:
    report = compile_launch(KERNELS[name], capability)
    assert report.fits, report
    assert report.spill_bytes == 0
    ptx = build(KERNELS[name], capability).asm["ptx"]
    assert "cvt.rn.satfinite.e4m3x2.f32" in ptx
    assert "max.NaN.f32" in ptx
    assert not re.search(r"max\.f32", ptx)
    assert "ld.global.v4.b32" in ptx


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name == "mx_gradient" else SLOW) for name in CLAMPED])
def test_the_clamped_activation_does_not_spill_either(name: str) -> None:
    assert compile_launch(CLAMPED[name], 100).fits
