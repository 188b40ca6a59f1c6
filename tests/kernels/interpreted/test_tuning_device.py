"""The tuner's problems in the interpreter: inputs fit the kernels, and every way to compute one gives the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moegraph.benchmarks import tuning_device
from moegraph.benchmarks.tuner import TORCH
from moegraph.benchmarks.tuning_device import DeviceTrial
from moegraph.kernels.config import FP8, Config
from moegraph.kernels.shapes import TORCH_HAS, block_problems
from tests.kernels.cases import relative_error

PROBLEMS = block_problems(tokens=20, d_model=48, d_ff=32, num_experts=3, top_k=2, dtype=torch.float32)
FP8_PROBLEMS = block_problems(tokens=20, d_model=48, d_ff=32, num_experts=3, top_k=2, dtype=FP8)
CPU = torch.device("cpu")


@pytest.mark.parametrize("name", PROBLEMS)
def test_two_configurations_compute_the_same_and_are_timed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning_device, "WARM_SECONDS", 0.0)
    trial = DeviceTrial(PROBLEMS[name], CPU, 90)
    one = Config(16, 32, 16, num_warps=4, num_stages=2)
    other = replace(one, block_m=32, group_m=1)
    have, want = trial.result(one), trial.result(other)
    assert len(have) == len(want) == {"up_swiglu": 2, "dgrad_swiglu": 3}.get(PROBLEMS[name].kernel, 1)
    for a, b in zip(have, want, strict=True):
        assert float(b.abs().max()) > 0
        assert relative_error(a, b) < 1e-6
    assert all(ms > 0 for ms in trial.milliseconds([one, other], 1))


@pytest.mark.parametrize("name", [name for name, p in PROBLEMS.items() if p.kernel in TORCH_HAS])
def test_torchs_grouped_kernel_computes_the_same(name: str) -> None:
    trial = DeviceTrial(PROBLEMS[name], CPU, 90)
    (have,), (want,) = trial.result(Config(16, 32, 16, num_warps=4, num_stages=2)), trial.result(TORCH)
    assert have.shape == want.shape
    assert relative_error(have, want) < 1e-6


@pytest.mark.parametrize("name", ["up_swiglu", "down", "dgrad_swiglu", "up_wgrad"])
def test_fp8_problems_are_quantised_and_computed_alike(name: str) -> None:
    trial = DeviceTrial(FP8_PROBLEMS[name], CPU, 90)
    one = Config(16, 32, 32, num_warps=4, num_stages=2)
    for a, b in zip(trial.result(one), trial.result(replace(one, block_m=32, group_m=1)), strict=True):
        assert float(b.float().abs().max()) > 0
        assert relative_error(a, b) < 2e-3
