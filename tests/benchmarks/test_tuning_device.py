"""Tuning on a GPU: every kernel of a small block within the budget, torch's kernel beside it, into a table."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from moegraph.benchmarks.tuner import TORCH, Rejected, tune
from moegraph.benchmarks.tuning_device import DeviceTrial
from moegraph.kernels.chips import card_of
from moegraph.kernels.config import Config
from moegraph.kernels.shapes import TORCH_HAS, block_problems
from moegraph.kernels.tuning_table import Table, read_table, write_table

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

PROBLEMS = block_problems(tokens=4096, d_model=512, d_ff=256, num_experts=8, top_k=2)
VERSIONS = {"moegraph": "0", "torch": torch.__version__, "triton": "0"}


def test_every_kernel_of_a_block_is_measured(tmp_path: Path) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    card = card_of(device)
    assert card is not None
    began = time.monotonic()
    found = list(
        tune(
            list(PROBLEMS.values()),
            lambda problem: DeviceTrial(problem, device, card.capability),
            capability=card.capability,
            seconds=40.0,
            versions=VERSIONS,
            date="2026-07-01",
        )
    )
    assert time.monotonic() - began < 55.0
    entries = [each.entry for each in found if each.entry is not None]
    assert len(entries) == len(PROBLEMS), [each.why for each in found]
    assert all((TORCH in each.against) == (each.shape.kernel in TORCH_HAS) for each in entries)
    assert all(0 < each.milliseconds < 10 for each in entries)
    assert all("wrong" not in each.skipped for each in found)
    assert any(each.tried > 1 for each in found)
    write_table(tmp_path / "table.json", Table(card, {}).with_entries(entries))
    assert len(read_table(tmp_path / "table.json").entries) == len(entries)


def test_what_cannot_be_launched_is_rejected() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    card = card_of(device)
    assert card is not None
    trial = DeviceTrial(PROBLEMS["down"], device, card.capability)
    with pytest.raises(Rejected, match="too large"):
        trial.compile(Config(num_stages=6))
    with pytest.raises(Rejected, match="failed"):
        trial.result(Config(num_stages=6))
    with pytest.raises(Rejected, match="spills"):
        trial.compile(Config(num_warps=4))
