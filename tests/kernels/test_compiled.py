"""Every kernel, configured by rule, compiled for three chips without a GPU: no spills, within shared memory, the chip's
matrix instruction, asynchronous loads. `test_compiled_tables.py` has more shapes and what tables say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from triton.backends.nvidia.compiler import get_ptxas

from moegraph.kernels.activation import Activation
from moegraph.kernels.adamw import adamw_launch
from moegraph.kernels.catalogue import cross_entropy_launches, embedding_grad_launches, exchange_launches, launches
from moegraph.kernels.chips import CHIPS, Card
from moegraph.kernels.compiled import build, compile_launch
from moegraph.kernels.config import default_config
from moegraph.kernels.gated_backward import gated_backward_launch
from moegraph.kernels.tiles import Schedule
from moegraph.kernels.up_swiglu import up_swiglu_launch

SHAPE = {"tokens": 32768, "d_model": 2048, "d_ff": 1024, "num_experts": 128, "top_k": 8}
KERNELS = {capability: dict(launches(**SHAPE, card=Card("any", capability))) for capability in CHIPS}
ROUTING = ["top_k", "sort_count", "sort_scan", "sort_place", "tile_schedule", "router_weights"]
MEMORY_BOUND = ["permute", "combine", "up_bias_grad", "gated_backward", "zero_tail"]
PRODUCTS = [name for name in KERNELS[90] if name not in ROUTING + MEMORY_BOUND]
INSTRUCTION = {90: "wgmma", 100: "tcgen05.mma", 103: "tcgen05.mma"}


# sm_100 and sm_103 are compiled to the same instructions: every day one of them, unless an operand is scaled
CHIPS_TODAY = [pytest.param(chip, marks=pytest.mark.slow) if chip == 100 else chip for chip in CHIPS]


@pytest.mark.parametrize("capability", CHIPS_TODAY)
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_uses_the_chips_matrix_unit_and_does_not_spill(name: str, capability: int) -> None:
    report = compile_launch(KERNELS[capability][name], capability)
    assert report.fits, report
    assert report.matrix_instruction == INSTRUCTION[capability], report
    assert report.asynchronous_loads, report


@pytest.mark.parametrize("capability", CHIPS_TODAY)
def test_biases_and_the_clamped_activation_do_not_spill_either(capability: int) -> None:
    def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    rows, index = 4096, tensor(4096, dtype=torch.int32)
    offsets, schedule = tensor(8, dtype=torch.int32), Schedule(index, index, index, index)
    x, weight, z, act = tensor(1024, 512), tensor(8, 512, 512), tensor(rows, 512), tensor(rows, 256)
    clamped, bias = Activation(True, 1.702, 7.0), tensor(8, 512)
    up = default_config("up_swiglu", torch.bfloat16, 256, 512, capability)
    scale = tensor(rows, dtype=torch.float32)
    for launch in (
        up_swiglu_launch(
            x,
            index,
            weight,
            offsets,
            z,
            act,
            top_k=4,
            bias=bias,
            activation=clamped,
            config=up,
            schedule=schedule,
        ),
        gated_backward_launch(act, z, scale, offsets, z, act, scale, activation=clamped),
    ):
        report = compile_launch(launch, capability)
        assert report.fits, report


@pytest.mark.parametrize("capability", CHIPS_TODAY)
def test_the_optimizers_kernel_does_not_spill(capability: int) -> None:
    weight, copy = (torch.empty(4096, dtype=d, device="meta") for d in (torch.float32, torch.bfloat16))
    options = {"factor": 0.5, "lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "step": 1}
    assert compile_launch(adamw_launch(weight, weight, weight, copy, copy, **options), capability).fits


@pytest.mark.parametrize("name", MEMORY_BOUND)
def test_what_is_bound_by_memory_does_not_spill(name: str) -> None:
    assert compile_launch(KERNELS[90][name], 90).fits


@pytest.mark.parametrize("capability", CHIPS_TODAY)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_loss_of_a_large_vocabulary_does_not_spill(capability: int, dtype: torch.dtype) -> None:
    for _, launch in cross_entropy_launches(tokens=16384, vocab_size=100352, dtype=dtype):
        assert compile_launch(launch, capability).fits


@pytest.mark.parametrize("capability", CHIPS_TODAY)
def test_the_gradient_of_an_embedding_does_not_spill(capability: int) -> None:
    ((_, launch),) = embedding_grad_launches(tokens=16384, vocab_size=100352, d_model=4096)
    assert compile_launch(launch, capability).fits


@pytest.mark.parametrize("capability", CHIPS_TODAY)
@pytest.mark.parametrize("num_experts", [3, 128, 256, 1024])
def test_choosing_and_sorting_does_not_spill(num_experts: int, capability: int) -> None:
    kernels = dict(launches(**{**SHAPE, "num_experts": num_experts, "top_k": min(num_experts, 8)}))
    for name in ROUTING:
        report = compile_launch(kernels[name], capability)
        assert report.fits, report


@pytest.mark.parametrize("capability", CHIPS_TODAY)
@pytest.mark.parametrize(("num_experts", "ranks", "top_k"), [(32, 2, 4), (1024, 64, 8), (3, 1, 1)])
def test_writing_rows_to_other_ranks_does_not_spill(num_experts: int, ranks: int, top_k: int, capability: int) -> None:
    shape = {"tokens": 16384, "d_model": 4096, "num_experts": num_experts, "top_k": top_k, "ranks": ranks}
    for name, launch in exchange_launches(**shape):
        assert compile_launch(launch, capability).fits, name


def test_rows_travel_in_16_byte_stores_and_signals_are_ordered_across_the_system() -> None:
    shape = {"tokens": 16384, "d_model": 4096, "num_experts": 32, "top_k": 4, "ranks": 8}
    ptx = {name: build(launch, 90).asm["ptx"] for name, launch in exchange_launches(**shape)}
    for name in ("put_rows_only", "take_rows_only", "send_back_only", "sum_slots_only"):
        stores = re.findall(r"st\.global\S*", ptx[name])
        assert stores, name
        assert set(stores) == {"st.global.v4.b32"}, name
    for name in ("say_arrived", "say_free"):
        assert "atom.global.sys.release.exch" in ptx[name], name
    for name in ("wait_for_rows", "wait_until_free"):
        assert "ld.global.sys.acquire" in ptx[name] or "atom.global.sys.acquire" in ptx[name], name


@pytest.mark.parametrize("name", PRODUCTS)
def test_fp32_kernels_compile_and_do_not_spill(name: str) -> None:
    shape = {"tokens": 1024, "d_model": 256, "d_ff": 128, "num_experts": 8, "top_k": 2}
    report = compile_launch(dict(launches(**shape, dtype=torch.float32))[name], 90)
    assert report.fits, report


def test_the_assembler_is_the_one_that_triton_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor points Triton at another one in torch's builds for CUDA 13: its PTX is too new for the bundled one."""
    calls, wrapper = tmp_path / "calls", tmp_path / "ptxas"
    wrapper.write_text(f'#!/bin/sh\necho "$@" >> {calls}\nexec {get_ptxas(90).path} "$@"\n')
    wrapper.chmod(0o700)
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(wrapper))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    assert compile_launch(KERNELS[90]["tile_schedule"], 90).fits
    said = calls.read_text().splitlines()
    assert sum("-v --gpu-name=sm_90a" in line for line in said) == 2, said  # Triton's own call, and the report's


def test_what_the_assembler_refuses_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = tmp_path / "ptxas"
    wrapper.write_text(
        f'#!/bin/sh\ncase "$3" in *kernel.ptx) echo "too new" >&2; exit 3;; esac\nexec {get_ptxas(90).path} "$@"\n'
    )
    wrapper.chmod(0o700)
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(wrapper))
    with pytest.raises(RuntimeError, match="returned 3: too new"):
        compile_launch(KERNELS[90]["tile_schedule"], 90)
