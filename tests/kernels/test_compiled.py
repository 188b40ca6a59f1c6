"""Every kernel compiled for three chips without a GPU: no spills, within shared memory, the chip's matrix instruction,
asynchronous loads."""

from __future__ import annotations

import pytest
import torch

from moegraph.kernels.catalogue import launches
from moegraph.kernels.compiled import CHIPS, compile_launch

SHAPE = {"tokens": 32768, "d_model": 2048, "d_ff": 1024, "num_experts": 128, "top_k": 8}
KERNELS = dict(launches(**SHAPE))
PRODUCTS = [name for name in KERNELS if name not in ("permute", "combine")]
INSTRUCTION = {90: "wgmma", 100: "tcgen05.mma", 103: "tcgen05.mma"}


@pytest.mark.parametrize("capability", CHIPS)
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_uses_the_chips_matrix_unit_and_does_not_spill(name: str, capability: int) -> None:
    report = compile_launch(KERNELS[name], capability)
    assert report.fits, report
    assert report.matrix_instruction == INSTRUCTION[capability], report
    assert report.asynchronous_loads, report


@pytest.mark.parametrize("name", ["permute", "combine"])
def test_moving_rows_does_not_spill(name: str) -> None:
    assert compile_launch(KERNELS[name], 90).fits


@pytest.mark.parametrize("name", PRODUCTS)
def test_fp32_kernels_compile_and_do_not_spill(name: str) -> None:
    shape = {"tokens": 1024, "d_model": 256, "d_ff": 128, "num_experts": 8, "top_k": 2}
    report = compile_launch(dict(launches(**shape, dtype=torch.float32))[name], 90)
    assert report.fits, report
