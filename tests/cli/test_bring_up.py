"""doctor --bring-up: one report whatever its parts do, and MXFP8 compared operator by operator."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moegraph.benchmarks import mx_native
from moegraph.benchmarks.mx_native import compare_native
from moegraph.cli.bring_up import Part, bring_up, doctor_bring_up, parts_for
from moegraph.errors import UsageError
from tests.cli.conftest import Moegraph

PARTS = [
    Part("fine", "prints JSON", ("-c", "print('{\"speed\": 1}')")),
    Part("broken", "raises", ("-c", "print('so far'); raise SystemExit('no such kernel')")),
    Part("stuck", "never ends", ("-c", "import time; print('began', flush=True); time.sleep(60)")),
    Part("after", "runs all the same", ("-c", "pass")),
]


def test_a_part_that_breaks_or_hangs_costs_only_itself_and_is_in_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.json"
    assert not bring_up(PARTS, report, {"versions": {"torch": "x"}}, limit=3)
    found = json.loads(report.read_text())
    assert found["versions"] == {"torch": "x"}
    fine, broken, stuck, after = found["parts"]
    assert (fine["status"], fine["json"]) == (0, {"speed": 1})
    assert (broken["status"], broken["output"], broken["error"]) == (1, "so far\n", "no such kernel\n")
    assert (stuck["status"], stuck["output"]) == (None, "began\n")
    assert 3 <= stuck["seconds"] < 20
    assert after["status"] == 0
    table = capsys.readouterr().out
    assert "status 1" in table
    assert "out of time" in table
    assert bring_up(PARTS[:1], report, {})


@pytest.mark.parametrize(
    ("capability", "low"), [((9, 0), "precision.fp8=rowwise"), ((10, 3), "precision.mxfp8.experts=on")]
)
def test_every_part_is_a_command_that_exists_and_8_bits_are_those_of_the_chip(
    moegraph: Moegraph, capability: tuple[int, int], low: str, tmp_path: Path
) -> None:
    parts = parts_for(capability, tmp_path)
    assert [part.name for part in parts] == ["doctor", "tests", "mxfp8", "tune", "layer", "step", "step, 8 bits"]
    assert f"--set={low}" in parts[-1].command
    for part in parts:
        if part.command[:2] == ("-m", "moegraph"):
            words = [word for word in part.command[2:] if word.startswith("--")]
            help_ = moegraph(*[word for word in part.command[2:4] if not word.startswith("-")], "--help").out
            assert all(word.partition("=")[0] in help_ for word in words), part


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_what_can_be_done(moegraph: Moegraph) -> None:
    done = moegraph("doctor", "--bring-up")
    assert done.status == 2
    assert "needs a GPU" in done.err
    with pytest.raises(UsageError, match="needs a GPU"):
        doctor_bring_up(Path("report.json"), ())


def test_operators_are_compared_and_a_wrong_one_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    found = compare_native(torch.device("cpu"), ((64, 64, 128),))
    assert [each["operator"] for each in found if each["ok"]] == [
        "mx_quantize_rows", "mx_quantize_columns", "mx_quantize_tokens", "mx_permute_quantize", "mx_grouped_mm",
        "mx_up_swiglu", "mx_dgrad_swiglu", "mx_linear_wgrad",
    ]  # fmt: skip
    whole, calls = mx_native._calls, 0

    def spoilt(*shape: int) -> dict[str, Callable[[torch.device], list[Tensor]]]:
        def every_other(call: Callable[[torch.device], tuple[Tensor, ...]]) -> Callable[[torch.device], list[Tensor]]:
            def run(device: torch.device) -> list[Tensor]:
                nonlocal calls
                calls += 1
                return [t.clone().view(torch.uint8).bitwise_xor(calls % 2).view(t.dtype) for t in call(device)]

            return run

        return {name: every_other(call) for name, call in whole(*shape).items()}

    monkeypatch.setattr(mx_native, "_calls", spoilt)
    assert not any(each["ok"] for each in compare_native(torch.device("cpu"), ((64, 64, 128),)))
