"""Which configuration a launch gets: the user's table, the shipped one, the rule; looked up once."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from timeit import timeit

import pytest
import torch

from moegraph.errors import RunError, UsageError
from moegraph.kernels import dgrad_swiglu, rows_gemm, tuning, up_swiglu, wgrad
from moegraph.kernels.chips import Card, card_for
from moegraph.kernels.config import Config, default_config
from moegraph.kernels.shapes import KERNELS, Problem, block_problems, rows_class
from moegraph.kernels.tiles import Schedule
from moegraph.kernels.tuning import choose_config, choose_for, table_digests, user_table

from .tables import CARD, PROBLEM, entry, write

ODD = Config(64, 128, 32, num_warps=4, num_stages=2, group_m=5)


@pytest.mark.parametrize(
    ("rows", "experts", "least"),
    [(0, 8, 64), (512, 8, 64), (513, 8, 128), (1024, 8, 128), (8192, 8, 1024), (8193, 8, 2048), (10**6, 8, 2048)],
)
def test_the_class_of_rows_per_expert_is_a_power_of_two(rows: int, experts: int, least: int) -> None:
    assert rows_class(rows, experts) == least


def test_a_shape_class_does_not_know_the_number_of_tokens() -> None:
    assert replace(PROBLEM, rows=PROBLEM.rows - 100).shape == PROBLEM.shape
    assert replace(PROBLEM, rows=2 * PROBLEM.rows).shape != PROBLEM.shape
    assert str(PROBLEM.shape) == "grouped_mm bf16 n 2048 k 1024, ≤ 256 rows per expert"


def test_the_users_table_comes_before_the_shipped_one_and_that_before_the_rule(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = choose_for(PROBLEM, CARD)
    assert (rule.source, rule.config) == ("rule", default_config("grouped_mm", torch.bfloat16, 2048, 1024))
    assert "not measured" in rule.reason
    # Files are looked for in kernels/tables; an absolute name stands for itself.
    shipped = write(tmp_path / "shipped.json", [entry(config=replace(ODD, group_m=6))])
    monkeypatch.setitem(tuning.SHIPPED, CARD.name, str(shipped))
    tuning.forget_choices()
    assert choose_for(PROBLEM, CARD)[:2] == (replace(ODD, group_m=6), "shipped table")
    write(user_table(CARD.name), [entry(config=ODD)])
    tuning.forget_choices()
    mine = choose_for(PROBLEM, CARD)
    assert mine[:2] == (ODD, "your table")
    assert mine.reason.startswith("2.000 ms (500 TFLOP/s) against 2.500 ms by rule; measured on Test Card 9000")
    other = replace(PROBLEM, k=512)
    assert choose_for(other, CARD).source == "rule"


def test_a_table_is_read_once_and_a_choice_costs_next_to_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    write(user_table(CARD.name), [entry()])
    original = tuning.read_table
    monkeypatch.setattr(tuning, "read_table", lambda path: read.append(path) or original(path))
    arguments = ("grouped_mm", torch.bfloat16, 2048, 1024, 4096, 16, CARD)
    choose_config(*arguments)
    choose_config(*arguments[:4], 4000, *arguments[5:])
    assert len(read) == 1
    assert min(timeit(lambda: choose_config(*arguments), number=1000) for _ in range(5)) < 2e-3  # 2 µs each


def test_a_run_can_say_which_tables_it_was_tuned_with(cache: Path) -> None:
    assert table_digests(torch.device("cpu")) == {}
    write(user_table(CARD.name), [entry()])
    before = table_digests(CARD)
    assert before["your table"] == hashlib.sha256(user_table(CARD.name).read_bytes()).hexdigest()
    write(user_table(CARD.name), [entry(config=ODD)])
    assert table_digests(CARD)["your table"] != before["your table"]


def test_another_cards_table_is_refused(cache: Path) -> None:
    write(user_table(CARD.name), [entry()], card=Card("Other Card", 90))
    with pytest.raises(RunError, match=r"test-card-9000\.json is refused: it was measured on Other Card"):
        choose_for(PROBLEM, CARD)


def test_off_cuda_no_table_is_read(cache: Path) -> None:
    user_table("cpu").parent.mkdir(parents=True)
    user_table("cpu").write_text("not a table")
    chosen = choose_for(PROBLEM, torch.device("cpu"))
    assert (chosen.source, chosen.reason) == ("rule", "no CUDA device: the rule for sm_90")


def test_every_chip_has_a_rule_that_says_it_was_not_measured() -> None:
    for arch in ("sm_90", "sm_100", "sm_103"):
        card = Card("nobody's", card_for(arch).capability)
        for kernel in KERNELS:
            chosen = choose_config(kernel, torch.bfloat16, 2048, 1024, 4096, 16, card)
            assert (chosen.source, "not measured" in chosen.reason) == ("rule", True)
    with pytest.raises(UsageError, match="sm_80: one of sm_90, sm_100, sm_103"):
        card_for("sm_80")


def test_every_launch_asks_for_its_own_shape_class(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problems = block_problems(tokens=256, d_model=128, d_ff=64, num_experts=4, top_k=2)
    configs = {
        name: Config(group_m=20 + i, parts=2 if p.kernel.startswith("grouped") else 1)
        for i, (name, p) in enumerate(problems.items())
    }
    write(user_table(CARD.name), [entry(p, configs[name]) for name, p in problems.items()])
    monkeypatch.setattr(tuning, "card_of", lambda device: CARD)

    def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    index = tensor(512, dtype=torch.int32)
    schedule, offsets = Schedule(index, index, index, index), tensor(4, dtype=torch.int32)
    w_up, w_down = tensor(4, 128, 128), tensor(4, 128, 64)
    x, wide, z, act = tensor(256, 128), tensor(512, 128), tensor(512, 128), tensor(512, 64)
    product = rows_gemm.grouped_mm_launch
    launches = {
        "up_swiglu": up_swiglu.up_swiglu_launch(x, index, w_up, offsets, z, act, top_k=1, schedule=schedule),
        "down": product(act, w_down, offsets, wide, schedule=schedule),
        "up": product(wide, w_up, offsets, z, schedule=schedule),
        "up_dgrad": product(z, w_up, offsets, wide, transposed=True, schedule=schedule),
        "down_dgrad": product(wide, w_down, offsets, act, transposed=True, schedule=schedule),
        "up_wgrad": wgrad.wgrad_launch(z, wide, offsets, w_up),
        "down_wgrad": wgrad.wgrad_launch(wide, act, offsets, w_down),
    }
    assert {name: launch.config for name, launch in launches.items()} == {name: configs[name] for name in launches}


def test_the_gradient_of_the_activation_asks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def choose(*arguments: object) -> object:
        asked.append(arguments)
        return choose_config(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(dgrad_swiglu, "choose_config", choose)
    empty = torch.empty(0, 128, dtype=torch.bfloat16)
    weight, offsets = torch.empty(4, 128, 64, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int32)
    dgrad_swiglu.dgrad_swiglu(empty, weight, empty, torch.empty(0), offsets)
    assert asked == [("dgrad_swiglu", torch.bfloat16, 64, 128, 0, 4, torch.device("cpu"))]


def test_products_of_a_block_count_its_operations() -> None:
    sizes = {"tokens": 100, "d_model": 64, "d_ff": 32, "num_experts": 4, "top_k": 2}
    problems = block_problems(**sizes)
    fused = ("up_swiglu", "down", "dgrad_swiglu", "up_dgrad", "up_wgrad", "down_wgrad")
    assert sum(problems[name].operations for name in fused) == 18 * 200 * 64 * 32
    assert Problem("wgrad", torch.bfloat16, 8, 16, 32, 2).operations == 2 * 8 * 16 * 32
