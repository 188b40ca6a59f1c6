"""Kernels that quantise, compiled for three chips without a GPU: no spills, the chip's own rounding to E4M3, rows moved
16 bytes at a time, and no multiplication that flushes subnormals."""

from __future__ import annotations

import re

import pytest
import torch

from moegraph.benchmarks.quantize import CONFIGS
from moegraph.kernels.catalogue import quantize_launches
from moegraph.kernels.chips import CHIPS
from moegraph.kernels.compiled import build, compile_launch
from moegraph.kernels.config import Config
from moegraph.kernels.mx_quantize import empty_quantized, mx_quantize_launch
from moegraph.kernels.tiles import Schedule, max_tiles

SHAPE = {"rows": 262144, "columns": 2048, "num_experts": 128}
KERNELS = dict(quantize_launches(**SHAPE))
WIDE = ("mx_columns", "mx_columns_swizzled", "mx_weight_columns", "mx_weight_columns_swizzled")
CAST = "cvt.rn.satfinite.e4m3x2.f32"


@pytest.mark.parametrize("capability", CHIPS)
@pytest.mark.parametrize("name", KERNELS)
def test_it_does_not_spill(name: str, capability: int) -> None:
    report = compile_launch(KERNELS[name], capability)
    assert report.fits, report
    assert report.registers <= (216 if name in WIDE else 128), report


@pytest.mark.parametrize("name", [name for name in KERNELS if name.startswith("mx_")])
def test_the_maximum_of_a_block_stays_in_a_warp_and_ignores_no_nan(name: str) -> None:
    """Shared memory is for the scales alone; a magnitude and a maximum are one instruction of the chip."""
    assert compile_launch(KERNELS[name], 90).shared_bytes <= 256
    ptx = build(KERNELS[name], 90).asm["ptx"]
    assert "max.NaN.f32" in ptx
    assert not re.search(r"max\.f32", ptx)


CASTS = [name for name in KERNELS if name not in ("fp8_columns_amax", "padded_offsets", "dequantize")]


@pytest.mark.parametrize("name", CASTS)
def test_data_moves_in_16_bytes_and_is_rounded_by_the_chip(name: str) -> None:
    ptx = build(KERNELS[name], 90).asm["ptx"]
    assert CAST in ptx
    assert "ld.global.v4.b32" in ptx
    assert "st.global.v4.b32" in ptx
    assert ".ftz" not in ptx


def test_what_restores_moves_data_in_16_bytes_and_flushes_no_subnormal() -> None:
    ptx = build(KERNELS["dequantize"], 90).asm["ptx"]
    assert "cvt.rn.f16x2.e4m3x2" in ptx
    assert "ld.global.v4.b32" in ptx
    assert "st.global.v4.b32" in ptx
    assert ".ftz" not in ptx


@pytest.mark.parametrize(
    ("columns", "num_experts"),
    [(2880, 1024), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((2880, 3), (14336, 3), (14336, 1024)))],
)
def test_fp32_and_other_widths_do_not_spill_either(columns: int, num_experts: int) -> None:
    shape = {"rows": 4096, "columns": columns, "num_experts": num_experts, "dtype": torch.float32}
    for name, launch in quantize_launches(**shape):
        if "weight" not in name:
            assert compile_launch(launch, 90).fits, name


def test_one_row_of_one_expert_and_one_tile_compile_too() -> None:
    """Triton makes a constant of an argument that is 1."""
    for name, launch in quantize_launches(rows=1, columns=32, num_experts=1):
        assert compile_launch(launch, 90).fits, name


def test_the_maxima_of_columns_are_found_without_floating_point_atomics() -> None:
    ptx = build(KERNELS["fp8_columns_amax"], 90).asm["ptx"]
    assert set(re.findall(r"(?:atom|red)\.global\S*", ptx)) == {"atom.global.gpu.relaxed.max.s32"}


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_configuration_that_is_swept_compiles_without_spills(config: Config) -> None:
    x, offsets = torch.empty(4096, 2048, dtype=torch.bfloat16, device="meta"), torch.empty(128, device="meta").int()
    index = torch.empty(max_tiles(4096, 128, 128), dtype=torch.int32, device="meta")
    schedule = Schedule(index, index, index, index[:1])
    for rows, columns in ((True, False), (False, True), (True, True)):
        out = empty_quantized(x, 128, rows=rows, columns=columns, swizzled=True)
        assert compile_launch(mx_quantize_launch(x, out, offsets, schedule, swizzled=True, config=config), 90).fits
