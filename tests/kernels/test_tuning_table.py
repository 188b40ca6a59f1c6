"""A tuning table is data: read exactly or refused by name, written whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch

from moegraph.errors import RunError
from moegraph.kernels import tuning_table
from moegraph.kernels.chips import Card
from moegraph.kernels.config import Config
from moegraph.kernels.shapes import KERNELS, TORCH_HAS, Problem
from moegraph.kernels.tuning import SHIPPED
from moegraph.kernels.tuning_table import read_table, write_table

from .tables import CARD, PROBLEM, entry, write

ALL = [
    entry(
        Problem(kernel, dtype, 256, 512, 10000, 8),
        backend="_grouped_mm" if kernel in TORCH_HAS and dtype == torch.bfloat16 else "triton",
        against={"rule": 2.5, "_grouped_mm": 1.25},
    )
    for kernel in KERNELS
    for dtype in (torch.bfloat16, torch.float32)
]


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    table = read_table(write(tmp_path / "new" / "table.json", ALL))
    assert table.card == CARD
    assert table.entries == {each.shape: each for each in ALL}
    better = replace(ALL[3], milliseconds=1.0)
    assert table.with_entries([better]).entries[better.shape] == better
    assert len(table.with_entries([better]).entries) == len(ALL)


def test_the_order_of_entries_does_not_depend_on_when_they_were_measured(tmp_path: Path) -> None:
    one, other = write(tmp_path / "one.json", ALL), write(tmp_path / "other.json", reversed(ALL))
    assert one.read_bytes() == other.read_bytes()


def test_a_table_knows_every_choice_of_a_configuration(tmp_path: Path) -> None:
    data = json.loads(write(tmp_path / "table.json", [entry()]).read_text())
    assert set(data["entries"][0]["config"]) == {each.name for each in fields(Config)}


def changed(change: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any]], str]:
    def text(data: dict[str, Any]) -> str:
        change(data)
        return json.dumps(data)

    return text


def first(**values: Any) -> Callable[[dict[str, Any]], str]:
    return changed(lambda data: data["entries"][0].update(values))


def config(**values: Any) -> Callable[[dict[str, Any]], str]:
    return changed(lambda data: data["entries"][0]["config"].update(values))


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (lambda data: "", "it is not JSON"),
        (lambda data: "{" * 100000, "it is not JSON"),
        (lambda data: "\udcff", "it is not JSON"),
        (lambda data: "[]", "the table must be an object, not []"),
        (lambda data: '{"card": 1, "card": 2}', "a key stands twice"),
        (lambda data: " " * (tuning_table.MAX_BYTES + 1), "larger than 4 MiB"),
        (changed(lambda data: data.update(format_version=2, new=1)), "format_version must be one of 1, not 2"),
        (changed(lambda data: data.update(format="other")), "the table.format must be one of moegraph-tuning"),
        (changed(lambda data: data.update(run="rm")), "the table has the unknown key 'run'"),
        (changed(lambda data: data.pop("card")), "the table lacks 'card'"),
        (changed(lambda data: data.update(entries={})), "the table.entries must be a list"),
        (
            changed(lambda data: data["entries"].append(data["entries"][0])),
            "entries[1] is the second one",
        ),
        (first(kernel="rows_gemm"), "entries[0].kernel must be one of up_swiglu"),
        (first(dtype="fp64"), "entries[0].dtype must be one of bf16"),
        (first(n=0), "entries[0].n must be a whole number"),
        (first(n=True), "entries[0].n must be a whole number"),
        (first(k=64.0), "entries[0].k must be a whole number"),
        (first(rows_per_expert=100), "entries[0].rows_per_expert must be one of 64"),
        (first(rows=10**6), "1000000 rows over 16 experts are not ≤ 256 each"),
        (first(milliseconds="2"), "entries[0].milliseconds must be a positive number"),
        (first(tflops=float("nan")), "NaN is not a number of JSON"),
        (first(milliseconds=10**400), "entries[0].milliseconds must be a positive number"),
        (first(against={"cublas": 1.0}), "entries[0].against has the unknown key 'cublas'"),
        (first(against={}, backend="_grouped_mm"), "entries[0].against lacks '_grouped_mm'"),
        (first(kernel="dgrad_swiglu", backend="_grouped_mm"), "torch has no grouped kernel for dgrad_swiglu"),
        (first(dtype="fp32", backend="_grouped_mm"), "torch has no grouped kernel for grouped_mm in fp32"),
        (first(versions={"torch": "2"}), "entries[0].versions lacks"),
        (first(date="today"), "entries[0].date must be a date such as 2026-07-01"),
        (first(note="x"), "entries[0] has the unknown key 'note'"),
        (config(block_m=96), "entries[0].config.block_m must be one of 16"),
        (config(num_stages=9), "entries[0].config.num_stages must be a whole number from 1 to 8"),
        (config(flatten=1), "entries[0].config.flatten must be one of True, False"),
        (config(parts=4), "grouped_mm cannot store 256 columns in 4 parts"),
        (config(separate=True), "grouped_mm has nothing that could be separate"),
    ],
)
def test_anything_else_is_refused_by_name(tmp_path: Path, edit: Callable[[dict[str, Any]], str], sentence: str) -> None:
    path = write(tmp_path / "table.json", [entry()])
    path.write_bytes(edit(json.loads(path.read_text())).encode("utf-8", "surrogateescape"))
    with pytest.raises(RunError) as caught:
        read_table(path)
    assert f"the tuning table {path} is refused" in str(caught.value)
    assert sentence in str(caught.value)
    assert "moegraph bench tune" in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"none\.json cannot be read: No such file"):
        read_table(tmp_path / "none.json")


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "table.json", [entry()])
    before = path.read_bytes()

    def fail(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tuning_table.os, "fsync", fail)
    with pytest.raises(RunError, match=r"table\.json cannot be written: No space left"):
        write(path, ALL)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_card_may_have_any_printable_name(tmp_path: Path) -> None:
    card = Card("NVIDIA “B300” / 288 GB", 103)
    write_table(tmp_path / "t.json", replace(read_table(write(tmp_path / "t.json", [])), card=card))
    assert read_table(tmp_path / "t.json").card == card


def test_shipped_tables_are_tables_of_the_cards_they_are_shipped_for() -> None:
    folder = Path(str(resources.files("moegraph.kernels"))) / "tables"
    assert {path.name for path in folder.iterdir()} == set(SHIPPED.values())
    for card, name in SHIPPED.items():
        assert read_table(folder / name).card.name == card


def test_a_reason_has_the_figures_of_both() -> None:
    reason = entry(PROBLEM, against={"_grouped_mm": 1.5}).reason
    assert reason("X").startswith("2.000 ms (500 TFLOP/s) against 1.500 ms _grouped_mm; measured on X, 2026-07-01")
