"""A run goes on under any layout: one that changes it at every step equals one that never does, in float64. Real
processes, the real data path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moegraph.checkpoint.names import CHECKPOINTS, step_name
from moegraph.checkpoint.reader import Checkpoint
from tests.checkpoint.small_checkpoints import Ran, run_spec, train_rank, whole
from tests.everyday import everyday
from tests.parallel.steps import SEQ_LEN
from tests.ranks import RankPool

Layout = tuple[int, int, int]  # dp, ep, pp
EVERY_DAY: list[Layout] = [(1, 1, 1), (2, 1, 1), (4, 4, 1), (2, 2, 2), (1, 1, 1)]
MORE: list[Layout] = [(1, 1, 1), (4, 1, 1), (2, 2, 1), (4, 4, 1), (2, 1, 2), (4, 2, 1), (2, 2, 2), (4, 1, 1), (1, 1, 4)]


TWELVE_SEQUENCES = f"train.tokens_per_step={12 * SEQ_LEN}"  # for 1, 2, 3 and 4 ranks


def go_on(ranks: RankPool, folder: Path, base: Path, layout: Layout, steps: int, *overrides: str, **more: Any) -> Ran:
    """Trains up to `steps` under a layout, from wherever the run in `folder` is."""
    dp, ep, pp = layout
    spec = run_spec(folder, f"train.steps={steps}", *overrides, dp=dp, ep=ep, pp=pp, **more)
    ran: Ran = ranks.run(spec.layout.world, train_rank, spec, base)[0]
    return ran


def state(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return whole(folder / "run" / CHECKPOINTS / step_name(step))


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp_min(1e-300))


def check_chain(ranks: RankPool, folder: Path, base: Path, layouts: list[Layout], *overrides: str) -> None:
    steps = len(layouts)
    expected = go_on(ranks, folder / "one", base, (1, 1, 1), steps, *overrides)
    ids: dict[int, list[int]] = {}
    for step, layout in enumerate(layouts, 1):
        ran = go_on(ranks, folder / "many", base, layout, step, *overrides)
        assert list(ran.ids) == [step], ran.ids
        ids.update(ran.ids)
    assert ids == expected.ids
    assert ran.losses == pytest.approx(expected.losses, rel=1e-10, abs=0)
    for step in range(1, steps + 1):
        found, right = state(folder / "many", step), state(folder / "one", step)
        assert found.keys() == right.keys()
        for name in right:
            assert found[name].dtype == right[name].dtype
            assert error(found[name], right[name]) < 1e-10, (step, name)


def test_a_run_that_changes_its_layout_at_every_step(ranks: RankPool, tokens: Path, tmp_path: Path) -> None:
    """A25, A26, A28, A29, A30: masters, moments, biases, sample ids and losses."""
    check_chain(ranks, tmp_path, tokens, EVERY_DAY)
    manifest = Checkpoint.open(tmp_path / "many" / "run" / CHECKPOINTS / step_name(4)).manifest
    assert (manifest.layout.dp, manifest.layout.ep, manifest.layout.pp, len(manifest.files)) == (2, 2, 2, 4)
    up = next(name for name in manifest.tensors if name.startswith("master.") and name.endswith("moe.w_up"))
    assert manifest.tensors[up].shape[0] == 4
    experts = state(tmp_path / "many", 4)[up]
    assert len({tuple(each.reshape(-1).tolist()) for each in experts}) == 4  # four experts, no two alike


@pytest.mark.slow
def test_three_ranks_go_on_from_four(ranks: RankPool, tokens: Path, tmp_path: Path) -> None:
    """Parts of parameters that end nowhere near each other."""
    check_chain(ranks, tmp_path, tokens, [(1, 1, 1), (2, 1, 1), (4, 1, 1), (3, 1, 1), (1, 1, 3)], TWELVE_SEQUENCES)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["exact", "padded"])
def test_more_changes(ranks: RankPool, tokens: Path, tmp_path: Path, transport: str) -> None:
    steps = len(MORE)
    expected = go_on(ranks, tmp_path / "one", tokens, (1, 1, 1), steps)
    for step, layout in enumerate(MORE, 1):
        more = {"transport": transport} if layout[1] > 1 else {}
        ran = go_on(ranks, tmp_path / "many", tokens, layout, step, **more)
    assert ran.losses == pytest.approx(expected.losses, rel=1e-10, abs=0)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zbv_zero_bubble"])
def test_schedules_with_several_stages_a_rank_and_tied_embeddings(
    ranks: RankPool, tokens: Path, tmp_path: Path, schedule: str
) -> None:
    tied = "model.tie_embeddings=true"
    expected = go_on(ranks, tmp_path / "one", tokens, (1, 1, 1), 4, tied)
    go_on(ranks, tmp_path / "many", tokens, (2, 1, 2), 1, tied)
    go_on(ranks, tmp_path / "many", tokens, (1, 1, 2), 2, tied, schedule=schedule, microbatches=4)
    go_on(ranks, tmp_path / "many", tokens, (2, 2, 2), 3, tied, schedule=schedule, microbatches=4)
    ran = go_on(ranks, tmp_path / "many", tokens, (1, 1, 1), 4, tied)
    assert ran.losses == pytest.approx(expected.losses, rel=1e-10, abs=0)


@pytest.mark.parametrize("mode", everyday(["async", "sync"]))
def test_the_same_layout_goes_on_bit_for_bit(ranks: RankPool, tokens: Path, tmp_path: Path, mode: str) -> None:
    layout, how = (2, 2, 1), f"checkpoint.mode={mode}"
    whole_run = go_on(ranks, tmp_path / "one", tokens, layout, 4, how)
    go_on(ranks, tmp_path / "two", tokens, layout, 2, how)
    ran = go_on(ranks, tmp_path / "two", tokens, layout, 4, how)
    assert list(ran.ids) == [3, 4]
    assert ran.losses == whole_run.losses
    found, right = state(tmp_path / "two", 4), state(tmp_path / "one", 4)
    assert all(torch.equal(found[name], right[name]) for name in right)
