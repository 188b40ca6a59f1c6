"""What a grouped product runs on: the faster one where its shape class was measured, else the device's default."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from moegraph import ops
from moegraph.errors import RunError
from moegraph.kernels.chips import Card
from moegraph.kernels.tuning import forget_choices, user_table
from tests.kernels.tables import CARD, PROBLEM, entry, write

B300 = Card("Test Blackwell", 103)
BOTH = {"rule": 2.5, "_grouped_mm": 1.5}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The user's cache folder is an empty one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    forget_choices()
    yield
    forget_choices()


def backend(card: Card, rows: int = PROBLEM.rows, kernel: str = "grouped_mm") -> tuple[str, str]:
    p = PROBLEM
    return ops.grouped_mm_backend(kernel, p.dtype, p.n, p.k, rows, p.experts, card)


def test_torchs_kernel_runs_where_it_was_faster_and_the_reason_has_both_figures() -> None:
    write(user_table(CARD.name), [entry(backend="_grouped_mm", against=BOTH)])
    chosen, reason = backend(CARD)
    assert chosen == "_grouped_mm"
    assert reason.startswith("your table: 2.000 ms (500 TFLOP/s) against 2.500 ms by rule and 1.500 ms _grouped_mm;")
    assert backend(CARD, rows=10 * PROBLEM.rows)[0] == "triton"  # another class
    assert backend(CARD, kernel="wgrad")[0] == "triton"


def test_a_measurement_lets_a_chip_leave_its_default() -> None:
    assert backend(B300)[0] == "_grouped_mm"
    forget_choices()
    write(user_table(B300.name), [entry()], card=B300)
    assert backend(B300)[0] == "triton"


def test_a_table_that_cannot_be_used_is_refused_and_not_passed_over() -> None:
    write(user_table(CARD.name), [entry()]).write_text("{}")
    with pytest.raises(RunError, match=r"test-card-9000\.json is refused"):
        backend(CARD)


def test_the_fused_experts_ask_for_their_own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def uses(kernel: str, rows: torch.Tensor, n: int, k: int, num_rows: int, num_experts: int) -> bool:
        asked.append((kernel, n, k, num_rows, num_experts))
        return False

    monkeypatch.setattr(importlib.import_module("moegraph.ops.expert_ffn"), "uses_kernels", uses)
    x, ids = torch.randn(6, 16, requires_grad=True), torch.randint(0, 4, (6, 2), dtype=torch.int32)
    metadata = ops.sort_by_expert(ids, 4)
    w_up, w_down = torch.randn(4, 16, 16), torch.randn(4, 16, 8)
    y, _ = ops.expert_ffn(x, *metadata, torch.rand(12), w_up, w_down, top_k=2)
    y.sum().backward()
    assert asked == [("up_swiglu", 8, 16, 12, 4), ("dgrad_swiglu", 8, 16, 12, 4)]
