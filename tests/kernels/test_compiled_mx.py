"""MXFP8 kernels, configured by rule, compiled for Blackwell without a GPU: block-scaled matrix instructions, scales
that go from shared to tensor memory past the registers, no spills, shared and tensor memory within limits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moegraph.kernels.compiled import build, compile_launch
from moegraph.kernels.config import mx_config
from moegraph.kernels.launch import Launch
from moegraph.kernels.mx_dgrad_swiglu import mx_dgrad_swiglu_launch
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


def launch(name: str) -> Launch:
    index = tensor(4096, dtype=torch.int32)
    offsets, schedule, weight = tensor(E, dtype=torch.int32), Schedule(*[index] * 4), tensor(R, dtype=torch.float32)
    z, act = tensor(R, 2 * F), tensor(R, F)
    if name == "up_swiglu":
        return mx_up_swiglu_launch(*operands(2 * F, D), offsets, z, act, schedule=schedule)
    if name == "dgrad_swiglu":
        config = mx_config("dgrad_swiglu", F, D)
        parts = tensor(R, F // config.block_n, dtype=torch.float32)
        rest = (z, weight, offsets, z, act, parts)
        return mx_dgrad_swiglu_launch(*operands(F, D), *rest, config=config, schedule=schedule)
    k, scaled = (F, weight) if name == "down" else (2 * F, None)
    return mx_grouped_mm_launch(*operands(D, k), offsets, tensor(R, D), row_weight=scaled, schedule=schedule)


@pytest.mark.parametrize("capability", [100, 103])
@pytest.mark.parametrize("name", ["up_swiglu", "down", "up_dgrad", "dgrad_swiglu"])
def test_a_product_uses_block_scaled_instructions_and_does_not_spill(name: str, capability: int) -> None:
    made = launch(name)
    report, built = compile_launch(made, capability), build(made, capability)
    assert report.fits, report
    assert report.asynchronous_loads, report
    assert built.metadata.tmem_size <= TENSOR_MEMORY
    ptx = built.asm["ptx"]
    assert "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale" in ptx
    assert "tcgen05.cp.cta_group::1.warpx4.32x128b" in ptx


def test_on_hopper_the_same_kernel_would_only_be_emulated() -> None:
    """Why `mx_backend` says no there: operands are widened to bf16 in registers first."""
    ptx = build(launch("down"), 90).asm["ptx"]
    assert "wgmma" in ptx
    assert "e4m3.e4m3" not in ptx
