"""FP8 kernels, configured by rule, compiled for three chips without a GPU: FP8 matrix instructions, no spills, within
shared memory, asynchronous loads."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from moegraph.kernels.candidates import candidates
from moegraph.kernels.chips import CHIPS, Card
from moegraph.kernels.compiled import build, compile_launch
from moegraph.kernels.config import FP8, default_config, exact_config, shared_memory
from moegraph.kernels.fp8_block_gemm import fp8_block_grouped_mm_launch
from moegraph.kernels.fp8_products import fp8_product_launch
from moegraph.kernels.fp8_quantize_blocks import fp8_blocks_launch
from moegraph.kernels.fp8_up_swiglu import fp8_up_swiglu_launch
from moegraph.kernels.gated_forward import gated_forward_launch
from moegraph.kernels.products import product_launch
from moegraph.kernels.shapes import block_problems
from moegraph.kernels.tiles import Schedule
from moegraph.kernels.tuning import choose_for

SIZES = {"tokens": 16384, "d_model": 4096, "d_ff": 2048, "num_experts": 16, "top_k": 4}
PROBLEMS = {name: p for name, p in block_problems(**SIZES, dtype=FP8).items() if name not in ("up", "down_dgrad")}
# Of a warp group on Hopper, of a block's single thread on Blackwell.
INSTRUCTION = {
    90: r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k32\.f32\.e4m3\.e4m3",
    100: r"tcgen05\.mma\.cta_group::1\.kind::f8f6f4",
    103: r"tcgen05\.mma\.cta_group::1\.kind::f8f6f4",
}


@pytest.mark.parametrize("capability", CHIPS)
@pytest.mark.parametrize("name", PROBLEMS)
def test_a_product_uses_fp8_matrix_units_and_does_not_spill(name: str, capability: int) -> None:
    config = choose_for(PROBLEMS[name], Card("nobody's", capability)).config
    launch = product_launch(PROBLEMS[name], config, row_weight=name == "down")
    report = compile_launch(launch, capability)
    assert report.fits, report
    assert report.asynchronous_loads, report
    assert re.search(INSTRUCTION[capability], build(launch, capability).asm["ptx"])


@pytest.mark.parametrize("name", PROBLEMS)
def test_exact_accumulation_does_not_spill(name: str) -> None:
    config = exact_config(default_config(PROBLEMS[name].kernel, FP8, PROBLEMS[name].n, PROBLEMS[name].k))
    report = compile_launch(fp8_product_launch(PROBLEMS[name], config, exact=True), 90)
    assert (config.block_n, report.spill_bytes) == (128, 0), report
    assert report.fits, report


def test_exact_accumulation_adds_outside_the_matrix_unit() -> None:
    """Every 128 products: one more addition per register of the accumulator in the loop."""
    config = exact_config(default_config("grouped_mm", FP8, 4096, 4096))
    adds = [
        len(re.findall(r"add\.f32", build(fp8_product_launch(PROBLEMS["down"], config, exact=exact), 90).asm["ptx"]))
        for exact in (False, True)
    ]
    assert adds[1] - adds[0] >= 64


def test_the_fused_gradient_fits_in_half_width_tiles() -> None:
    config = replace(
        default_config("dgrad_swiglu", FP8, 2048, 4096), separate=False, flatten=False, block_n=128, parts=4
    )
    report = compile_launch(product_launch(PROBLEMS["dgrad_swiglu"], config), 90)
    assert report.fits, report


def tensor(*shape: int, dtype: torch.dtype = FP8) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def test_kernels_with_scales_in_blocks_do_not_spill() -> None:
    rows, d, f, experts = 65536, 4096, 2048, 16
    f32, bf16, index = torch.float32, torch.bfloat16, tensor(4096, dtype=torch.int32)
    offsets, options = tensor(experts, dtype=torch.int32), {"schedule": Schedule(*[index] * 4)}
    x, x_scale, w_scale = tensor(rows, d), tensor(rows, dtype=f32), tensor(experts, 2 * f, dtype=f32)
    act, act_scale, z = tensor(rows, f), tensor(f // 128, rows, dtype=f32), tensor(rows, 2 * f, dtype=bf16)
    bias = tensor(experts, d, dtype=bf16)
    down, down_scale = tensor(experts, d, f), tensor(experts, d // 128, f // 128, dtype=f32)
    for launch in (
        fp8_up_swiglu_launch(x, x_scale, tensor(experts, 2 * f, d), w_scale, offsets, z, act, act_scale, **options),
        fp8_block_grouped_mm_launch(
            act,
            act_scale,
            down,
            down_scale,
            offsets,
            tensor(rows, d, dtype=bf16),
            bias=bias,
            row_weight=x_scale,
            **options,
        ),
    ):
        report = compile_launch(launch, 90)
        assert report.fits, report
        assert report.asynchronous_loads, report
        assert re.search(INSTRUCTION[90], build(launch, 90).asm["ptx"])


def test_what_goes_around_them_does_not_spill_and_moves_in_16_bytes() -> None:
    rows, d, f, experts = 65536, 4096, 2048, 16
    bf16, f32 = torch.bfloat16, torch.float32
    offsets, x, weight = (
        tensor(experts, dtype=torch.int32),
        tensor(rows, d, dtype=bf16),
        tensor(experts, d, f, dtype=bf16),
    )
    launches = {
        "rows": fp8_blocks_launch(x, offsets, tensor(rows, d), tensor(d // 128, rows, dtype=f32)),
        "weights": fp8_blocks_launch(
            weight, None, tensor(experts, d, f), tensor(experts, d // 128, f // 128, dtype=f32)
        ),
        "activation": gated_forward_launch(x, offsets, tensor(rows, f, dtype=bf16)),
    }
    for name, launch in launches.items():
        report, ptx = compile_launch(launch, 90), build(launch, 90).asm["ptx"]
        assert report.fits, (name, report)
        assert report.registers <= 128, (name, report)
        assert "ld.global.v4.b32" in ptx, name
        assert "st.global.v4.b32" in ptx, name
        assert name == "activation" or "cvt.rn.satfinite.e4m3x2.f32" in ptx


@pytest.mark.parametrize("name", PROBLEMS)
def test_candidates_start_with_the_rule_and_stay_within_the_chip(name: str) -> None:
    p = PROBLEMS[name]
    for capability, chip in CHIPS.items():
        found = candidates(p.kernel, FP8, p.n, p.k, capability)
        assert found[0] == default_config(p.kernel, FP8, p.n, p.k, capability)
        assert len(found) == len(set(found)) > 20
        assert all(shared_memory(p.kernel, each, FP8, capability) <= chip.shared_limit for each in found)
        assert p.kernel != "wgrad" or max(each.block_k for each in found) == 128


def test_the_estimate_of_shared_memory_covers_what_is_allocated() -> None:
    for p in PROBLEMS.values():
        for config in candidates(p.kernel, FP8, p.n, p.k, 90)[1:24:11]:
            report = compile_launch(product_launch(p, config), 90)
            assert (
                report.shared_bytes <= shared_memory(p.kernel, config, FP8) + config.block_m * config.block_n * 2 + 128
            )
