"""Steps of a run of several ranks, trained again by as many."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from moegraph.runtime.audit import AUDIT, linked, read_chain
from moegraph.runtime.progress import Progress
from moegraph.runtime.replay import Replay, replay
from moegraph.runtime.trace import trace_step
from moegraph.runtime.trace_compare import compare
from moegraph.runtime.trace_file import Trace
from moegraph.specs.schema import Spec
from tests.ranks import RankPool

from .small_checkpoints import compiled_for, flip_bit, run_spec, train_rank


def replays(rank: int, spec: Spec, base: Path, run: Path) -> Replay:
    progress = Progress(spec.train.steps, stream=io.StringIO())
    world, compiled = spec.layout.world, compiled_for(spec)
    return replay(spec, run, (3, 4), base=base, progress=progress, compiled=compiled, rank=rank, world=world)


@pytest.mark.slow
def test_all_ranks_find_the_same_steps_and_the_same_first_difference(
    ranks: RankPool, tokens: Path, tmp_path: Path
) -> None:
    spec = run_spec(tmp_path, "train.steps=4", "checkpoint.every=2", dp=2, ep=2)
    run = tmp_path / "run"
    ranks.run(2, train_rank, spec, tokens)
    assert ranks.run(2, replays, spec, tokens, run) == [Replay(2, 3, 4)] * 2
    *first, last = read_chain(run)
    facts = {key: value for key, value in last.items() if key not in ("previous", "digest")}
    first.append(linked({**facts, "counts": "0" * 64}, last["previous"]))
    (run / AUDIT).write_text("".join(json.dumps(line) + "\n" for line in first), encoding="utf-8")
    for found in ranks.run(2, replays, spec, tokens, run):
        assert found.differs == 4
        assert (found.difference or "").startswith(f"counts was {'0' * 64}")


def traces(rank: int, spec: Spec, base: Path, run: Path) -> Trace | None:
    progress = Progress(spec.train.steps, stream=io.StringIO())
    world, compiled = spec.layout.world, compiled_for(spec)
    return trace_step(spec, run, 3, base=base, progress=progress, compiled=compiled, rank=rank, world=world)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "name", "element", "rank"),
    [
        ({"dp": 2, "ep": 2}, "layers.2.moe.w_down", 3 * 6 * 8, 1),  # the first element of expert 3 of 4
        ({"pp": 2, "microbatches": 4, "schedule": "interleaved_zero_bubble"}, "layers.1.attention.q.weight", 0, 1),
    ],
    ids=["experts", "pipeline"],
)
def test_a39_the_rank_that_reads_the_changed_weight_is_named(
    ranks: RankPool, tokens: Path, tmp_path: Path, layout: dict[str, Any], name: str, element: int, rank: int
) -> None:
    """Liger#1255; what other ranks compute of it comes later."""
    spec = run_spec(tmp_path, "train.steps=2", "checkpoint.every=2", **layout)
    ranks.run(2, train_rank, spec, tokens)
    more = run_spec(tmp_path, "train.steps=4", "checkpoint.every=2", **layout)
    first, _ = ranks.run(2, traces, more, tokens, tmp_path / "run")
    flip_bit(tmp_path / "run" / "checkpoints" / "step-000002", f"master.{name}", element)
    second, _ = ranks.run(2, traces, more, tokens, tmp_path / "run")
    assert compare(first, first).first is None
    found = compare(first, second).first
    assert found is not None
    assert (found[0].parameter, found[0].key.rank) == (name, rank)
    assert (found[0].key.graph, found[0].key.microbatch) == ("forward", 0)
