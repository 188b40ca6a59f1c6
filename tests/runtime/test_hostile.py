"""What lies in a run's folder, damaged at random: refused in a sentence, in little memory, or read as it was."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moegraph.cli.inspect_run import print_run
from moegraph.compiled_folder import read_compiled
from moegraph.errors import CheckFailed, UsageError
from moegraph.runtime.audit import AUDIT, linked, read_chain
from moegraph.runtime.run_log import MANIFEST, METRICS, read_manifest, read_records
from moegraph.runtime.trace_compare import compare
from moegraph.runtime.trace_file import read_trace
from tests.mutations import mutate_bytes, mutate_text, mutate_tree, within_memory

LIMIT = 256 << 20  # bytes of address space
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 17))]


@pytest.fixture
def chain(tmp_path: Path) -> list[dict[str, Any]]:
    """A chain of 20 steps, on disk."""
    lines, previous = [], "0" * 64
    for step in range(20):
        facts = {"step": step, "loss": 5.0 - step / 8, "grad_norm": 1.0, "counts": "a" * 64, "samples": "b" * 64}
        lines.append(linked(facts if step else {"step": 0, "data": "c" * 64, "seed": 0}, previous))
        previous = lines[-1]["digest"]
    (tmp_path / AUDIT).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return lines


def said(read: Callable[[], object]) -> str | None:
    """Why it was refused, or None."""
    try:
        with within_memory(LIMIT):
            read()
    except (CheckFailed, UsageError) as error:
        return str(error)
    return None


@pytest.mark.parametrize("seed", SEEDS)
def test_mutated_chains(chain: list[dict[str, Any]], tmp_path: Path, seed: int) -> None:
    """A chain that is taken for whole has the lines that were written, but perhaps for the last ones."""
    chance, path = random.Random(seed), tmp_path / AUDIT
    good = path.read_bytes()
    refused = 0
    for _ in range(60):
        lines = good.splitlines(keepends=True)
        if chance.random() < 0.5:
            where = chance.randrange(len(lines))
            lines[where] = json.dumps(mutate_tree(json.loads(lines[where]), chance)).encode() + b"\n"
            path.write_bytes(b"".join(lines))
        else:
            path.write_bytes(chance.choice([mutate_text, mutate_bytes])(good, chance))
        why = said(lambda: read_chain(tmp_path))
        refused += why is not None
        if why is None:
            found = read_chain(tmp_path)
            assert found == chain[: len(found)]
        else:
            assert AUDIT in why
            assert len(why) < 1000
    assert refused > 30


@pytest.mark.parametrize("seed", SEEDS)
def test_mutated_records_and_manifests(tmp_path: Path, seed: int) -> None:
    """Lines that are no records are left out."""
    chance = random.Random(seed)
    metrics = b"".join(json.dumps({"step": step, "loss": 1.5}).encode() + b"\n" for step in range(20))
    manifest = json.dumps({"spec": {"model": {"d_model": 8}}, "started": "x", "versions": {"torch": "2"}}).encode()
    for _ in range(60):
        change = chance.choice([mutate_text, mutate_bytes])
        (tmp_path / METRICS).write_bytes(change(metrics, chance))
        (tmp_path / MANIFEST).write_bytes(change(manifest, chance))
        assert said(lambda: read_records(tmp_path)) is None
        why = said(lambda: read_manifest(tmp_path))
        assert why is None or len(why) < 1000


LAYER = {"dead_experts": 0, "load_max": 1.0, "load_min": 1.0, "router_entropy": 1.0, "counts": [1, 2]}
RECORD = {"step": 4, "loss": 1.5, "grad_norm": 1.0, "router": {"layers.1": LAYER}}
RUN = {
    "spec": {"model": {"moe": {}}, "train": {"steps": 9}},
    "started": "x",
    "parameters": {"total": 1, "active": 1},
    "device": "CPU",
    "versions": {"torch": "2"},
}
REPORT = {
    "format": "moegraph-compiled",
    "format_version": 1,
    "passes": [{"name": "a", "hash": "b"}],
    "versions": {"torch": "2"},
    "pass_files": {"x.py": ["a"]},
    "rank": None,
    "world": 2,
}


@pytest.mark.parametrize("seed", SEEDS)
def test_mutated_runs_and_compiled_directories_are_shown_or_refused(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    assert read_compiled_of(tmp_path, json.dumps(REPORT).encode()) is None
    for _ in range(60):
        change = chance.choice([lambda tree, chance: json.dumps(mutate_tree(tree, chance)).encode(), _as_text])
        (tmp_path / METRICS).write_bytes(change(json.loads(json.dumps(RECORD)), chance) + b"\n")
        (tmp_path / MANIFEST).write_bytes(change(json.loads(json.dumps(RUN)), chance))
        for router, as_json in ((False, False), (True, False), (True, True)):
            why = said(lambda: print_run(tmp_path, router=router, as_json=as_json))  # noqa: B023
            assert why is None or len(why) < 1000
        read_compiled_of(tmp_path, change(json.loads(json.dumps(REPORT)), chance))


def _as_text(tree: Any, chance: random.Random) -> bytes:
    return mutate_text(json.dumps(tree).encode(), chance)


def read_compiled_of(folder: Path, report: bytes) -> str | None:
    (folder / "report.json").write_bytes(report)
    return said(lambda: read_compiled(folder))


@pytest.mark.parametrize("seed", SEEDS)
def test_mutated_traces(tmp_path: Path, seed: int) -> None:
    """One that is read can be compared with itself."""
    node = {"name": "a", "operation": "input", "value": "f32[1]", "layer": "", "direction": "", "made_by": "lower"}
    call = {"microbatch": 0, "place": 0, "kind": "k", "graph": "forward", "digests": "0123456789abcdef"}
    rank = {
        "graphs": {"k/forward": [node]},
        "calls": [call],
        "moments": {},
        "gradients": {"w": "0" * 16},
        "weights": {},
    }
    trace = {"format": "moegraph-trace", "version": 1, "run": "r", "start": 0, "step": 1, "loss": 1.5, "grad_norm": 1.0,
        "data": "", "device": "CPU", "versions": {}, "spec": {"layout": {"dp": 1}}, "ranks": [rank],
        "blocks": [{"prefix": "b", "parameters": {}}]}  # fmt: skip
    chance, path = random.Random(seed), tmp_path / "trace.json"
    path.write_text(json.dumps(trace), encoding="utf-8")
    assert compare(read_trace(path), read_trace(path)).compared == 2
    refused = 0
    for _ in range(60):
        change = chance.choice([lambda tree, chance: json.dumps(mutate_tree(tree, chance)).encode(), _as_text])
        path.write_bytes(change(json.loads(json.dumps(trace)), chance))
        why = said(lambda: compare(read_trace(path), read_trace(path)))
        refused += why is not None
        assert why is None or len(why) < 1000
    assert refused > 30


@pytest.mark.parametrize("name", [AUDIT, METRICS, MANIFEST])
def test_a_file_of_10_gigabytes_is_not_read_into_memory(tmp_path: Path, name: str) -> None:
    with (tmp_path / name).open("wb") as file:
        file.truncate(10 << 30)
    read = {AUDIT: read_chain, METRICS: read_records, MANIFEST: read_manifest}[name]
    assert said(lambda: read(tmp_path)) is not None


@pytest.mark.parametrize("name", [AUDIT, METRICS, MANIFEST])
def test_a_pipe_in_its_place_is_not_waited_for(tmp_path: Path, name: str) -> None:
    import os

    os.mkfifo(tmp_path / name)
    read = {AUDIT: read_chain, METRICS: read_records, MANIFEST: read_manifest}[name]
    assert said(lambda: read(tmp_path)) is not None
