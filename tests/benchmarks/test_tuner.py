"""The tuner's search, with a device that is a formula and a clock that only moves when something is done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moegraph.benchmarks.tuner import TORCH, Outcome, Rejected, Way, tune
from moegraph.kernels.candidates import candidates, changes
from moegraph.kernels.chips import Card
from moegraph.kernels.config import Config
from moegraph.kernels.shapes import Problem
from moegraph.kernels.tuning_table import Table, read_table, write_table
from tests.everyday import everyday

PROBLEM = Problem("grouped_mm", torch.bfloat16, 2048, 1024, 262144, 128)
UP = Problem("up_swiglu", torch.bfloat16, 1024, 2048, 262144, 128, 32768)
ROOT = Path(__file__).parents[2]


@dataclass
class Device:
    """A second to compile, a hundredth to run once; `speed` is a configuration's milliseconds."""

    speed: Callable[[Config], float]
    torch_ms: float = 99.0
    reject: Callable[[Config], str | None] = lambda config: None
    wrong: Callable[[Way], bool] = lambda way: False
    now: float = 0.0
    compiled: list[Config] = field(default_factory=list)
    timed: list[int] = field(default_factory=list)

    def compile(self, config: Config) -> None:
        self.now += 1.0
        self.compiled.append(config)
        why = self.reject(config)
        if why is not None:
            raise Rejected(why)

    def result(self, way: Way) -> tuple[Tensor, ...]:
        self.now += 0.01
        value = torch.linspace(1, 2, 64).to(torch.bfloat16)
        return (value + 0.1 if self.wrong(way) else value,)

    def milliseconds(self, ways: Sequence[Way], turns: int) -> list[float]:
        found = [self.torch_ms if way == TORCH else self.speed(way) for way in ways]  # type: ignore[arg-type]
        self.now += 0.2 + 3e-3 * turns * sum(found)
        self.timed.append(turns)
        return found


def outcomes(device: Device, problems: Sequence[Problem] = (PROBLEM,), seconds: float = 200.0) -> list[Outcome]:
    versions = {"moegraph": "0.1.0", "torch": "2.11.0", "triton": "3.6.0"}
    options = {"capability": 90, "seconds": seconds, "versions": versions, "date": "2026-07-01"}
    return list(tune(problems, lambda problem: device, clock=lambda: device.now, **options))


def far_from(target: Config) -> Callable[[Config], float]:
    return lambda config: 2.0 + 0.5 * changes(config, target)


def test_the_fastest_is_found_though_it_is_far_from_the_rule() -> None:
    rule, *others = candidates("grouped_mm", torch.bfloat16, 2048, 1024, 90)
    target = next(each for each in others if changes(each, rule) == 4)
    device = Device(far_from(target))
    (found,) = outcomes(device)
    assert found.entry is not None
    assert found.entry.config == target
    assert found.entry.milliseconds == 2.0
    assert found.entry.against == {"rule": 4.0, TORCH: 99.0}
    assert found.entry.tflops == pytest.approx(2 * 262144 * 2048 * 1024 / 2e-3 / 1e12)
    assert found.entry.backend == "triton"
    assert found.tried < found.candidates
    assert found.not_reached == found.candidates - found.tried


def test_the_budget_is_kept_and_shared_and_what_was_not_reached_is_said() -> None:
    device = Device(lambda config: 2.0)
    found = outcomes(device, [PROBLEM, UP, replace(UP, n=512)], seconds=60.0)
    assert device.now < 62.0
    assert all(each.entry is not None for each in found)
    assert [each.seconds for each in found] == pytest.approx([20.0] * 3, abs=1.5)
    assert all(each.not_reached == each.candidates - each.tried > 0 for each in found)
    device = Device(lambda config: 2.0)
    found = outcomes(device, [PROBLEM, UP, replace(UP, n=512)], seconds=1.5)
    assert [(each.tried, each.why) for each in found[1:]][-1] == (0, "not reached within the time budget")
    assert found[-1].not_reached == found[-1].candidates
    assert device.now < 6.0


@pytest.mark.slow
def test_no_candidate_is_tried_twice() -> None:
    device = Device(lambda config: 2.0)
    (found,) = outcomes(device, seconds=10000.0)
    assert found.not_reached == 0
    assert len(device.compiled) == len(set(device.compiled)) == found.tried == found.candidates


def test_what_does_not_compile_spills_or_is_wrong_is_skipped_and_counted() -> None:
    rule = candidates("grouped_mm", torch.bfloat16, 2048, 1024, 90)[0]
    device = Device(
        lambda config: 1.0 if config.num_stages == 2 or config.num_warps == 4 else 2.0,
        reject=lambda config: "spills" if config.num_warps == 4 else "failed" if config.group_m == 16 else None,
        wrong=lambda way: way != TORCH and way.num_stages == 2,  # type: ignore[union-attr]
    )
    (found,) = outcomes(device, seconds=100.0)
    assert found.entry is not None
    assert found.entry.config == rule
    assert set(found.skipped) == {"spills", "failed", "wrong"}
    assert sum(found.skipped.values()) < found.tried


def test_nothing_is_said_of_a_shape_whose_rule_cannot_be_measured() -> None:
    device = Device(lambda config: 1.0, reject=lambda config: "failed")
    (found,) = outcomes(device)
    assert found.entry is None
    assert (found.tried, found.why) == (1, "the rule's configuration cannot be measured (failed)")


def test_a_gain_within_the_noise_does_not_displace_the_rule() -> None:
    rule = candidates("grouped_mm", torch.bfloat16, 2048, 1024, 90)[0]
    (found,) = outcomes(Device(lambda config: 2.0 if config == rule else 1.99))
    assert found.entry is not None
    assert (found.entry.config, found.entry.milliseconds) == (rule, 2.0)


@pytest.mark.parametrize(("torch_ms", "backend"), everyday([(1.99, "triton"), (3.0, "triton"), (1.5, TORCH)]))
def test_torchs_kernel_becomes_the_backend_where_it_is_faster(torch_ms: float, backend: str) -> None:
    (found,) = outcomes(Device(lambda config: 2.0, torch_ms=torch_ms))
    assert found.entry is not None
    assert (found.entry.backend, found.entry.against[TORCH]) == (backend, torch_ms)


def test_torchs_kernel_is_timed_only_where_there_is_one_and_left_out_where_it_is_wrong() -> None:
    (fused,) = outcomes(Device(lambda config: 2.0, torch_ms=1.0), [UP])
    (fp32,) = outcomes(Device(lambda config: 2.0, torch_ms=1.0), [replace(PROBLEM, dtype=torch.float32)])
    (wrong,) = outcomes(Device(lambda config: 2.0, torch_ms=1.0, wrong=lambda way: way == TORCH))
    for found in (fused, fp32, wrong):
        assert found.entry is not None
        assert (found.entry.backend, TORCH in found.entry.against) == ("triton", False)
    assert wrong.skipped["_grouped_mm wrong"] == 1


def test_entries_can_be_written_and_read(tmp_path: Path) -> None:
    found = outcomes(Device(lambda config: 2.0), [PROBLEM, UP])
    entries = [each.entry for each in found if each.entry is not None]
    card = Card("Test Card", 90)
    write_table(tmp_path / "t.json", Table(card, {}).with_entries(entries))
    assert list(read_table(tmp_path / "t.json").entries.values()) == entries


def test_only_bench_tune_knows_the_tuner() -> None:
    """Training never measures: nothing that it imports can reach this."""
    allowed = {"tuner.py", "tuning_device.py", "bench_tune.py"}
    sources = [path for folder in ("moegraph", "kernels", "passes", "specs") for path in (ROOT / folder).rglob("*.py")]
    assert len(sources) > 100
    knowing = {path.name for path in sources if "benchmarks.tun" in path.read_text(encoding="utf-8")}
    assert knowing <= allowed
    users = {path.name for path in sources if "bench_tune" in path.read_text(encoding="utf-8")} - allowed
    assert users == {"bench.py"}
