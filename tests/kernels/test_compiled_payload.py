"""Kernels for rows that travel in MXFP8, compiled for three chips without a GPU: no spills, 16 bytes at a time, the
chip's own rounding and decoding."""

from __future__ import annotations

import re

import pytest
import torch

from moegraph.kernels.catalogue import payload_launches
from moegraph.kernels.chips import CHIPS
from moegraph.kernels.compiled import build, compile_launch

SHAPE = {"tokens": 16384, "d_model": 4096, "num_experts": 32, "top_k": 4, "ranks": 8}
KERNELS = dict(payload_launches(**SHAPE))
MOVERS = ("permute", "put_rows_only", "take_rows_only")


CHIP = [pytest.param(each, marks=pytest.mark.slow if each == 103 else ()) for each in CHIPS]


@pytest.mark.parametrize("capability", CHIP)
@pytest.mark.parametrize("name", KERNELS)
def test_it_does_not_spill(name: str, capability: int) -> None:
    report = compile_launch(KERNELS[name], capability)
    assert report.fits, report
    assert report.registers <= 128, report


@pytest.mark.parametrize("name", MOVERS)
def test_payloads_travel_in_16_byte_stores(name: str) -> None:
    """A row of 4096 elements has 4224 bytes, a multiple of 16."""
    stores = re.findall(r"st\.global\S*", build(KERNELS[name], 90).asm["ptx"])
    assert stores
    assert set(stores) == {"st.global.v4.b32"}


@pytest.mark.parametrize("capability", CHIP)
def test_the_chip_rounds_and_decodes_and_flushes_no_subnormal(capability: int) -> None:
    encode, decode = (build(KERNELS[name], capability).asm["ptx"] for name in ("mx_encode", "mx_decode"))
    assert "cvt.rn.satfinite.e4m3x2.f32" in encode
    assert "max.NaN.f32" in encode
    assert "cvt.rn.f16x2.e4m3x2" in decode
    for ptx in (encode, decode):
        assert "ld.global.v4.b32" in ptx
        assert "st.global.v4.b32" in ptx
        assert ".ftz" not in ptx


@pytest.mark.slow
@pytest.mark.parametrize("width", [32, 2880])
def test_widths_that_are_not_aligned_compile_too(width: int) -> None:
    shape = {**SHAPE, "d_model": width, "tokens": 1, "ranks": 1, "dtype": torch.float32}
    for name, launch in payload_launches(**shape):
        assert compile_launch(launch, 90).fits, name
