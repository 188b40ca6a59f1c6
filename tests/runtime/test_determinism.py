"""With `train.deterministic: true` a run is repeated bit for bit, in this process and in another one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import config

from moegraph.compiled import compile
from moegraph.runtime.device import run_settings

from .small_runs import Run, run, run_spec

SETTINGS = ("train.deterministic=true", "precision.compute=bf16", "train.steps=4", "layout.microbatches=2")
MEASURED = ("seconds", "tokens_per_second", "tflops", "mfu", "memory_bytes")

SCRIPT = """\
import sys
from pathlib import Path
from tests.runtime.small_runs import run, run_spec
run(run_spec(Path(sys.argv[1]), *sys.argv[3:]), Path(sys.argv[2]))
"""


def numbers(records: list[dict[str, Any]]) -> list[Mapping[str, Any]]:
    """What a record says about the model, without what it says about the clock."""
    return [{key: value for key, value in record.items() if key not in MEASURED} for record in records]


def same(a: Run, b: Run) -> bool:
    return numbers(a.records) == numbers(b.records) and all(torch.equal(a.weights[n], b.weights[n]) for n in a.weights)


def test_two_runs_in_one_process_are_bitwise_equal_and_another_seed_is_not(tokens: Path, tmp_path: Path) -> None:
    graphs = compile(run_spec(tmp_path, *SETTINGS))  # the seed is no part of them
    first = run(run_spec(tmp_path / "1", *SETTINGS), tokens, graphs)
    assert same(first, run(run_spec(tmp_path / "2", *SETTINGS), tokens, graphs))
    assert not same(first, run(run_spec(tmp_path / "3", *SETTINGS, "train.seed=1"), tokens, graphs))


@pytest.mark.slow
def test_two_runs_in_two_processes_are_bitwise_equal(tokens: Path, tmp_path: Path) -> None:
    here = run(run_spec(tmp_path / "here", *SETTINGS), tokens)
    arguments = [sys.executable, "-c", SCRIPT, str(tmp_path / "there"), str(tokens), *SETTINGS]
    subprocess.run(arguments, check=True, timeout=120, cwd=Path(__file__).parents[2], env={**os.environ})
    from safetensors.torch import load_file

    from moegraph.runtime.run_log import read_records

    folder = tmp_path / "there" / "run"
    there = Run(here.result, read_records(folder), load_file(folder / "model.safetensors"), "")
    assert same(here, there)


def test_the_settings_of_a_run_end_with_it(tokens: Path, tmp_path: Path) -> None:
    def settings() -> tuple[object, ...]:
        names = ("CUBLAS_WORKSPACE_CONFIG", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
        return torch.are_deterministic_algorithms_enabled(), config.deterministic, *map(os.environ.get, names)

    before = settings()
    with run_settings(deterministic=True):
        assert settings()[:2] == (True, True)
    run(run_spec(tmp_path, *SETTINGS), tokens)
    assert settings() == before
