"""MXFP8 weight gradients compiled for Blackwell without a GPU: block-scaled matrix instructions, operands that stay as
they lie in memory, no spills, shared and tensor memory within limits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moegraph.kernels.compiled import build, compile_launch
from moegraph.kernels.launch import Launch
from moegraph.kernels.mx_wgrad import mx_wgrad_launch
from moegraph.ops.mx_scales import num_tiles

E, D, F, R = 16, 4096, 2048, 65536
TENSOR_MEMORY = 512  # columns


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def launch(name: str) -> Launch:
    if name == "linear":  # tokens that do not complete a block of 128
        grad, rows = (tensor(R - 28, D, dtype=torch.float8_e4m3fn) for _ in range(2))
        scale = tensor(D, R // 32, dtype=torch.uint8)
        return mx_wgrad_launch(grad, scale, rows, scale, tensor(1, dtype=torch.int32), tensor(1, D, D))
    n, k, padded = (2 * F, D, 128 * num_tiles(R, E)) if name == "up" else (D, F, 128 * num_tiles(R, E))
    grad, rows = (tensor(padded, width, dtype=torch.float8_e4m3fn) for width in (n, k))
    grad_scale, rows_scale = (tensor(width, padded // 32, dtype=torch.uint8) for width in (n, k))
    return mx_wgrad_launch(grad, grad_scale, rows, rows_scale, tensor(E, dtype=torch.int32), tensor(E, n, k))


@pytest.mark.parametrize("capability", [100, 103])
@pytest.mark.parametrize("name", ["up", *(pytest.param(name, marks=pytest.mark.slow) for name in ("down", "linear"))])
def test_a_weight_gradient_uses_block_scaled_instructions_and_does_not_spill(name: str, capability: int) -> None:
    made = launch(name)
    report, built = compile_launch(made, capability), build(made, capability)
    assert report.fits, report
    assert report.spill_bytes == 0
    assert report.asynchronous_loads, report
    assert built.metadata.tmem_size <= TENSOR_MEMORY
    ptx = built.asm["ptx"]
    assert "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale" in ptx
    assert "tcgen05.cp.cta_group::1.warpx4.32x128b" in ptx


def test_operands_of_a_weight_gradient_are_turned_by_the_matrix_unit_not_by_copies() -> None:
    """Both have their contraction first in memory: they go from shared memory to the tensor cores as they lie."""
    graph = build(launch("up"), 100).asm["ttgir"]
    loop = graph[graph.index("scf.for") :]
    assert "memdesc_trans" in loop
    assert not [line for line in loop.splitlines() if "local_load" in line and "f8E4M3FN" in line]
