"""What the command line says about kernels: `doctor --kernels`, `inspect --kernels`, `bench tune`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moegraph.benchmarks.tuner import Outcome
from moegraph.kernels import chips
from moegraph.kernels.shapes import block_problems
from moegraph.kernels.tuning import forget_choices, user_table
from moegraph.kernels.tuning_table import read_table
from tests.kernels.tables import CARD, PROBLEM, entry, write

from .conftest import Moegraph

BLOCK = ["--tokens", "512", "--d-model", "64", "--d-ff", "32", "--experts", "4", "--top-k", "2"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The user's cache folder is an empty one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    forget_choices()
    yield
    forget_choices()


def test_doctor_compiles_every_kernel_for_a_chip_that_is_not_here(moegraph: Moegraph) -> None:
    done = moegraph("doctor", "--kernels", "--arch", "sm_103", "--preset", "D", "--json")
    assert done.status == 0, done.err
    found = {each["name"]: each for each in done.json["kernels"]}
    assert set(block_problems(tokens=8, d_model=8, d_ff=8, num_experts=2, top_k=2)) < set(found)
    assert (done.json["ok"], done.json["chip"]) == (True, "sm_103 (B300)")
    up = found["up_swiglu"]
    assert up["report"]["matrix_instruction"] == "tcgen05.mma"
    assert (up["choice"]["source"], up["failed"]) == ("rule", [])
    assert up["backend"]["name"] == "_grouped_mm"
    assert found["permute"]["choice"] is None


def test_doctor_fails_a_configuration_that_spills(
    moegraph: Moegraph, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from moegraph.kernels.config import Config

    a = block_problems(tokens=32768, d_model=2048, d_ff=1024, num_experts=128, top_k=8)
    slow = [entry(a["up_wgrad"], Config(num_warps=4)), entry(a["down"], Config(num_stages=5, parts=2))]
    write(user_table("NVIDIA H200"), slow, card=chips.card_for("sm_90"))
    done = moegraph("doctor", "--kernels", "--arch", "sm_90")
    assert done.status == 1
    assert "up_wgrad: spills" in done.err
    assert "down: takes" in done.err
    assert "your table" in done.out
    assert "2.000 ms (500 TFLOP/s) against 2.500 ms by rule; measured on NVIDIA H200" in done.out


def test_inspect_says_what_each_product_of_a_spec_runs_on(
    small: Path, moegraph: Moegraph, cached_compile: None
) -> None:
    done = moegraph("inspect", "--kernels", "--arch", "sm_90", "--json")
    assert done.status == 0, done.err
    products = done.json["products"]
    assert {each["kernel"] for each in products} == {"grouped_mm", "grouped_mm_dgrad", "wgrad"}
    assert all((each["backend"], each["choice"]["source"]) == ("triton", "rule") for each in products)
    text = moegraph("inspect", "--kernels", "--arch", "sm_100", "--kind", "moe").out
    assert "no grouped kernel for torch.float32 on compute capability 10.x" in text
    assert "moe.up/grouped_mm" in text


def test_a_damaged_table_is_named(small: Path, moegraph: Moegraph, cached_compile: None) -> None:
    write(user_table("NVIDIA H200"), []).write_text("[]")
    done = moegraph("inspect", "--kernels", "--arch", "sm_90")
    assert done.status == 1
    assert "nvidia-h200.json is refused: the table must be an object" in done.err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["doctor", "--arch", "sm_90"], "--arch goes with --kernels"),
        (["doctor", "--preset", "A"], "--preset goes with --kernels"),
        (["doctor", "--kernels", "--arch", "sm_80"], "one of sm_90, sm_100, sm_103"),
        (["doctor", "--kernels", "--preset", "Z"], "one of A, C, D, Q, wide"),
        (["doctor", "presets/tiny.yaml", "--kernels"], "`moegraph inspect SPEC --kernels`"),
        (["inspect", "presets/tiny.yaml", "--arch", "sm_90"], "--arch goes with --kernels"),
        (["inspect", "presets/tiny.yaml", "--kernels", "--stat"], "--stat does not go with --kernels"),
        (["inspect", "presets/tiny.yaml", "--kernels", "--arch", "90"], "one of sm_90"),
        (["bench", "tune"], "one of: SPEC, --preset A,C, or --tokens"),
        (["bench", "tune", "presets/tiny.yaml", "--preset", "A"], "one of: SPEC, --preset A,C, or --tokens"),
        (["bench", "tune", "--preset", "A,Z"], "--preset A,Z: A, C, D, Q, wide"),
        (["bench", "tune", "--preset", "A", "--set", "a=1"], "--set goes with SPEC"),
        (["bench", "tune", "--preset", "A", "--dtype", "fp4"], "--dtype fp4: bf16 or fp8"),
        (["bench", "tune", "presets/tiny.yaml", "--dtype", "fp8"], "--dtype goes with --preset or a block"),
        (["bench", "tune", *BLOCK[:-2]], "a block needs --top-k too"),
        (["bench", "tune", *BLOCK[:-1], "8"], "--top-k 8 is more than --experts 4"),
    ],
)
def test_a_call_that_cannot_work_is_refused(moegraph: Moegraph, arguments: list[str], sentence: str) -> None:
    done = moegraph(*arguments)
    assert done.status == 2
    assert sentence in done.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_tuning_needs_a_cuda_device_and_says_so(moegraph: Moegraph) -> None:
    done = moegraph("bench", "tune", "--preset", "A")
    assert done.status == 1
    assert "bench tune measures kernels on a CUDA device and torch sees none" in done.err


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A CUDA device on which a problem is measured by what this list says: an entry, or why there is none."""
    says: list[Any] = []

    def outcomes(problems: Any, *_: Any) -> Iterator[Outcome]:
        for problem in problems:
            entry_or_why = says.pop(0) if says else "not reached within the time budget"
            if isinstance(entry_or_why, str):
                yield Outcome(problem, None, 100, why=entry_or_why)
            else:
                yield Outcome(problem, entry(problem, **entry_or_why), 100, 12, {"spills": 2})

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(chips, "card_of", lambda device: CARD)
    monkeypatch.setattr("moegraph.cli.bench_tune._outcomes", outcomes)
    return says


def test_what_was_measured_is_written_beside_what_was_there(moegraph: Moegraph, device: list[Any]) -> None:
    write(user_table(CARD.name), [entry()])
    device += [{"milliseconds": 1.0}, {"backend": "_grouped_mm", "against": {"rule": 3.0, "_grouped_mm": 1.5}}]
    done = moegraph("bench", "tune", *BLOCK)
    assert done.status == 0, done.err
    entries = read_table(user_table(CARD.name)).entries
    problems = block_problems(tokens=512, d_model=64, d_ff=32, num_experts=4, top_k=2)
    assert set(entries) == {PROBLEM.shape, problems["up_swiglu"].shape, problems["down"].shape}
    assert entries[problems["up_swiglu"].shape].milliseconds == 1.0
    assert "12/100  2 spills" in done.out
    assert "176 of 200 candidates, of 2 classes, were not reached within the time budget" in done.err
    assert "wgrad bf16 n 64 k 64, ≤ 256 rows per expert: not reached within the time budget" in done.err
    assert f"written to {user_table(CARD.name)}" in done.err


def test_the_table_can_be_another_file(moegraph: Moegraph, device: list[Any], tmp_path: Path) -> None:
    device += [{}] * 8
    done = moegraph("bench", "tune", "--preset", "A,D", "--output", tmp_path / "mine.json", "--json")
    assert done.status == 0, done.err
    assert len(read_table(tmp_path / "mine.json").entries) == 8
    assert not user_table(CARD.name).exists()
    assert done.json["classes"][0]["not_reached"] == 88
    assert len(done.json["classes"]) == 16


def test_a_table_that_cannot_be_kept_is_refused_before_anything_is_measured(
    moegraph: Moegraph, device: list[Any], tmp_path: Path
) -> None:
    device += [{}]
    (tmp_path / "mine.json").write_text("{}")
    done = moegraph("bench", "tune", *BLOCK, "-o", tmp_path / "mine.json")
    assert done.status == 1
    assert "mine.json is refused" in done.err
    assert len(device) == 1


def test_a_spec_is_tuned_for_the_shapes_of_its_graphs(
    small: Path, moegraph: Moegraph, device: list[Any], cached_compile: None
) -> None:
    device += [{}] * 6
    done = moegraph("bench", "tune", "moegraph.yaml", "--json")
    assert done.status == 0, done.err
    assert all((each["dtype"], each["rows_per_expert"]) == ("fp32", 64) for each in done.json["classes"])
    dense = moegraph("bench", "tune", "presets/tiny-dense.yaml")
    assert (dense.status, "has no experts" in dense.err) == (2, True)
