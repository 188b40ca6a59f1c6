"""Candidates: the rule first, its neighbours next, and nothing that the chip, the kernel or a table cannot hold."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moegraph.errors import RunError
from moegraph.kernels.candidates import candidates, changes
from moegraph.kernels.chips import CHIPS
from moegraph.kernels.config import default_config, shared_memory
from moegraph.kernels.shapes import KERNELS, Problem
from moegraph.kernels.tuning_table import read_table
from tests.everyday import everyday

from .tables import entry, write

SIZES = [(2048, 1024), (64, 4096), (768, 96)]


@pytest.mark.parametrize("capability", CHIPS)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", everyday([torch.bfloat16, torch.float32]))
def test_the_rule_is_first_and_all_are_within_limits(kernel: str, dtype: torch.dtype, capability: int) -> None:
    for n, k in SIZES:
        found = candidates(kernel, dtype, n, k, capability)
        assert found[0] == default_config(kernel, dtype, n, k, capability)
        assert len(found) == len(set(found)) > 20
        distances = [changes(each, found[0]) for each in found]
        assert distances == sorted(distances)
        limit = CHIPS[capability].shared_limit
        assert all(shared_memory(kernel, each, dtype, capability) <= limit for each in found)


def test_tiles_are_no_wider_than_the_output_needs() -> None:
    assert {each.block_n for each in candidates("grouped_mm", torch.bfloat16, 64, 2048, 90)} == {64}
    assert max(each.block_n for each in candidates("up_swiglu", torch.bfloat16, 64, 2048, 90)) == 128
    assert max(each.block_m for each in candidates("wgrad", torch.bfloat16, 128, 2048, 90)) == 128


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_table_takes_every_candidate(kernel: str, tmp_path: Path) -> None:
    for i, config in enumerate(candidates(kernel, torch.bfloat16, 2048, 1024, 90)):
        if i % 40 == 0:
            problem = Problem(kernel, torch.bfloat16, 2048, 1024, 4096, 16)
            path = write(tmp_path / "table.json", [entry(problem, config)])
            assert read_table(path).entries[problem.shape].config == config


def test_a_table_takes_the_slices_of_the_fp8_up_projection(tmp_path: Path) -> None:
    """Its epilogue works in slices; that of the bf16 one does not."""
    problem = Problem("up_swiglu", torch.float8_e4m3fn, 2048, 1024, 4096, 16)
    config = candidates("up_swiglu", problem.dtype, 2048, 1024, 90)[0]
    assert config.parts == 2
    path = write(tmp_path / "table.json", [entry(problem, config)])
    assert read_table(path).entries[problem.shape].config == config
    other = Problem("up_swiglu", torch.bfloat16, 2048, 1024, 4096, 16)
    with pytest.raises(RunError, match="cannot store 256 columns in 2 parts"):
        read_table(write(tmp_path / "other.json", [entry(other, config)]))
