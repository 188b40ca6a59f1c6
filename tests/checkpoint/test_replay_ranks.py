"""Steps of a run of several ranks, trained again by as many."""

from __future__ import annotations

import io
import json
from pathlib import Path

from moegraph.runtime.audit import AUDIT, linked, read_chain
from moegraph.runtime.progress import Progress
from moegraph.runtime.replay import Replay, replay
from moegraph.specs.schema import Spec
from tests.ranks import RankPool

from .small_checkpoints import compiled_for, run_spec, train_rank


def replays(rank: int, spec: Spec, base: Path, run: Path) -> Replay:
    progress = Progress(spec.train.steps, stream=io.StringIO())
    world, compiled = spec.layout.world, compiled_for(spec)
    return replay(spec, run, (3, 4), base=base, progress=progress, compiled=compiled, rank=rank, world=world)


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
