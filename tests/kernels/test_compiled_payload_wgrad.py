"""Weight gradients that dequantise payloads as they load, compiled for three chips without a GPU: no spills, the chip's
matrix unit, elements that reach it without leaving the thread that decodes them, and products that end in time."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from moegraph.kernels.chips import CHIPS
from moegraph.kernels.compiled import build, compile_launch
from moegraph.kernels.launch import Launch
from moegraph.kernels.mx_payload import payload_bytes
from moegraph.kernels.payload_wgrad import payload_wgrad_launch

E, D, F, R = 16, 4096, 2048, 65536
CASES = ["down", "up, added", "up", "down, added", "both"]
EVERY_DAY = [("down", 90), ("down", 100), ("up, added", 90)]
ALL = [
    pytest.param(case, chip, marks=() if (case, chip) in EVERY_DAY else pytest.mark.slow)
    for case in CASES
    for chip in CHIPS
]


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def payload(width: int) -> Tensor:
    return tensor(R, payload_bytes(width), dtype=torch.uint8)


def launch(case: str, capability: int) -> Launch:
    added = "added" in case
    n, k = (D, F) if "down" in case else (2 * F, D)
    grad = payload(n) if "up" not in case else tensor(R, n)
    rows = payload(k) if "down" not in case else tensor(R, k)
    out = tensor(E, n, k, dtype=torch.float32 if added else torch.bfloat16)
    offsets = tensor(E, dtype=torch.int32)
    return payload_wgrad_launch(grad, rows, offsets, out, accumulate=added, capability=capability)


@functools.cache
def built(case: str, capability: int) -> Any:
    return build(launch(case, capability), capability)


@pytest.mark.parametrize(("case", "capability"), ALL)
def test_it_uses_the_matrix_unit_and_does_not_spill(case: str, capability: int) -> None:
    report = compile_launch(launch(case, capability), capability)
    assert report.fits, report
    assert report.matrix_instruction == CHIPS[capability].matrix_instruction
    assert report.asynchronous_loads, report
    if capability == 90:  # two of four warps share a multiprocessor
        assert 2 * report.shared_bytes <= report.shared_limit, report
        assert 2 * 128 * report.registers <= 65536, report
    ptx = built(case, capability).asm["ptx"]
    assert "cvt.rn.f16x2.e4m3x2" in ptx
    assert ".ftz" not in ptx


def test_on_hopper_no_element_leaves_its_thread_and_no_operand_is_overwritten_under_a_product() -> None:
    """In the loop: pairs are read from shared memory straight to where the left operand has them, nothing else goes
    through shared memory, and before the next step's elements are decoded all products have ended."""
    made = built("down", 90)
    graph = made.asm["ttgir"]
    loop = graph[graph.index("tt.elementwise_inline_asm", graph.index("scf.for")) :]
    loop = loop[: loop.index("scf.yield")]
    assert "local_alloc" not in loop
    assert "local_store" not in loop
    assert "ttng.warp_group_dot" in loop
    held = loop.index("mov.b32 $0, $1;")
    assert re.findall(r"warp_group_dot_wait .*?pendings = (\d+)", loop[:held])[-1] == "0"
    assert "ttng.warp_group_dot " not in loop[held:]
    assert "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16" in made.asm["ptx"]
