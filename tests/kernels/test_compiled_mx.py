"""MXFP8 kernels, configured by rule, compiled for Blackwell without a GPU: block-scaled matrix instructions, scales
that go from shared to tensor memory past the registers, no spills, shared and tensor memory within limits."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from moegraph.kernels.activation import Activation
from moegraph.kernels.compiled import build, compile_launch
from moegraph.kernels.config import mx_config
from moegraph.kernels.gated_backward import gated_backward_launch
from moegraph.kernels.launch import Launch
from moegraph.kernels.mx_dgrad_swiglu import mx_dgrad_swiglu_launch
from moegraph.kernels.mx_quantize import empty_swizzled
from moegraph.kernels.mx_rows_gemm import mx_grouped_mm_launch
from moegraph.kernels.mx_up_swiglu import mx_up_swiglu_launch
from moegraph.kernels.tiles import Schedule
from moegraph.ops.mx_scales import num_tiles

E, D, F, R = 16, 4096, 2048, 65536
TENSOR_MEMORY = 512  # columns


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def operands(n: int, k: int) -> tuple[Tensor, ...]:
    data, scale = {"dtype": torch.float8_e4m3fn}, {"dtype": torch.uint8}
    rows = (tensor(R, k, **data), tensor(128 * num_tiles(R, E), k // 32, **scale))
    return (*rows, tensor(E, n, k, **data), tensor(E, n, k // 32, **scale))


def launch(name: str, bias: Tensor | None = None, activation: Activation = Activation()) -> Launch:
    index = tensor(4096, dtype=torch.int32)
    offsets, schedule, weight = tensor(E, dtype=torch.int32), Schedule(*[index] * 4), tensor(R, dtype=torch.float32)
    z, act = tensor(R, 2 * F), tensor(R, F)
    if name == "up_swiglu":
        return mx_up_swiglu_launch(*operands(2 * F, D), offsets, z, act, schedule=schedule)
    if name == "up_swiglu, quantised":
        rest = (offsets, z, *empty_swizzled(act, R, F, E))
        return mx_up_swiglu_launch(*operands(2 * F, D), *rest, bias=bias, activation=activation, schedule=schedule)
    saved, saved_scale = tensor(R, 2 * F, dtype=torch.float8_e4m3fn), tensor(R, F // 16, dtype=torch.uint8)
    if name == "up_swiglu, saved":
        rest = (offsets, saved, *empty_swizzled(act, R, F, E), saved_scale)
        return mx_up_swiglu_launch(*operands(2 * F, D), *rest, bias=bias, activation=activation, schedule=schedule)
    if name == "dgrad_swiglu, saved":
        config = mx_config("dgrad_swiglu_saved", F, D)
        parts = tensor(R, F // config.block_n, dtype=torch.float32)
        options = {"dz_quantized": empty_swizzled(act, R, 2 * F, E), "config": config, "schedule": schedule}
        rest = (saved, weight, offsets, z, act, parts)
        return mx_dgrad_swiglu_launch(*operands(F, D), *rest, z_scale=saved_scale, **options)
    if name == "dgrad_swiglu, quantised":
        config = mx_config("dgrad_swiglu_quantized", F, D)
        parts = tensor(R, F // config.block_n, dtype=torch.float32)
        options = {"dz_quantized": empty_swizzled(act, R, 2 * F, E), "config": config, "schedule": schedule}
        return mx_dgrad_swiglu_launch(*operands(F, D), z, weight, offsets, z, act, parts, **options)
    if name == "dgrad_swiglu":
        config = mx_config("dgrad_swiglu", F, D)
        parts = tensor(R, F // config.block_n, dtype=torch.float32)
        rest = (z, weight, offsets, z, act, parts)
        return mx_dgrad_swiglu_launch(*operands(F, D), *rest, config=config, schedule=schedule)
    k, scaled = (F, weight) if name == "down" else (2 * F, None)
    return mx_grouped_mm_launch(*operands(D, k), offsets, tensor(R, D), row_weight=scaled, schedule=schedule)


PLAIN = ["up_swiglu", "down", "up_dgrad", "dgrad_swiglu"]
QUANTISING = [f"{name}, {how}" for name in ("up_swiglu", "dgrad_swiglu") for how in ("quantised", "saved")]


# Every day on one of the two chips, whose difference is the assembler's target.
EVERY_DAY = {
    ("up_swiglu", 100),
    ("up_swiglu, quantised", 103),
    ("down", 100),
    ("up_dgrad", 103),
    ("dgrad_swiglu", 100),
    ("dgrad_swiglu, quantised", 103),
    ("dgrad_swiglu, saved", 100),
}
CASES = [
    pytest.param(name, capability, marks=() if (name, capability) in EVERY_DAY else pytest.mark.slow)
    for name in PLAIN + QUANTISING
    for capability in (100, 103)
]


@pytest.mark.parametrize(("name", "capability"), CASES)
def test_a_product_uses_block_scaled_instructions_and_does_not_spill(name: str, capability: int) -> None:
    made = launch(name)
    report, built = compile_launch(made, capability), build(made, capability)
    assert report.fits, report
    assert report.asynchronous_loads, report
    assert built.metadata.tmem_size <= TENSOR_MEMORY
    ptx = built.asm["ptx"]
    assert "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale" in ptx
    assert "tcgen05.cp.cta_group::1.warpx4.32x128b" in ptx


@pytest.mark.parametrize(("name", "capability"), [case for case in CASES if case.values[0] in QUANTISING])
def test_an_epilogue_that_quantises_rounds_by_the_chip_and_ignores_no_nan(name: str, capability: int) -> None:
    ptx = build(launch(name), capability).asm["ptx"]
    assert "cvt.rn.satfinite.e4m3x2.f32" in ptx
    assert "max.NaN.f32" in ptx
    assert not re.search(r"max\.f32", ptx)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["up_swiglu, quantised", "up_swiglu, saved"])
def test_bias_and_clamp_in_front_of_it_do_not_spill(name: str) -> None:
    made = launch(name, tensor(E, 2 * F), Activation(True, 1.702, 7.0))
    assert compile_launch(made, 100).fits


@pytest.mark.parametrize("capability", [90, 103])
def test_the_clamped_activations_gradient_is_quantised_by_a_kernel_that_does_not_spill(capability: int) -> None:
    z, act, weight = tensor(R, 2 * F), tensor(R, F), tensor(R, dtype=torch.float32)
    given = (act, z, weight, tensor(E, dtype=torch.int32), z, act, weight, empty_swizzled(act, R, 2 * F, E))
    made = gated_backward_launch(*given, activation=Activation(True, 1.702, 7.0))
    assert compile_launch(made, capability).fits
    assert "cvt.rn.satfinite.e4m3x2.f32" in build(made, capability).asm["ptx"]


def test_on_hopper_the_same_kernel_would_only_be_emulated() -> None:
    """Why `mx_backend` says no there: operands are widened to bf16 in registers first."""
    ptx = build(launch("down"), 90).asm["ptx"]
    assert "wgmma" in ptx
    assert "e4m3.e4m3" not in ptx
