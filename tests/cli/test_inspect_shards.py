"""`moegraph inspect --shards`: the map from parameters to the ranks that they are reduced over."""

from __future__ import annotations

from pathlib import Path

import pytest

from .conftest import Moegraph

LAYOUT = ("--set", "layout={dp: 4, ep: 2, pp: 2}", "--set", "train.tokens_per_step=256")


@pytest.mark.usefixtures("small")
def test_a19_experts_and_dense_parameters_are_reduced_over_their_own_ranks(moegraph: Moegraph) -> None:
    done = moegraph("inspect", "--shards", "--json", *LAYOUT)
    assert done.status == 0, done.err
    families = done.json["families"]
    expert = next(each for each in families if each["family"].startswith("experts"))
    assert expert["ranks"] == [4, 6]
    assert expert["pp_rank"] == 1
    assert all(".moe.w_" in name for name in expert["parameters"])
    dense = [each for each in families if each["family"].startswith("dense")]
    assert {tuple(each["ranks"]) for each in dense} == {(0, 1, 2, 3), (4, 5, 6, 7)}
    assert not any(".moe.w_" in name for each in dense for name in each["parameters"])
    assert all(each["shard"] * len(each["ranks"]) >= each["elements"] for each in families)


@pytest.mark.usefixtures("small")
def test_without_expert_parallelism_experts_are_dense_parameters(moegraph: Moegraph) -> None:
    families = moegraph("inspect", "--shards", "--json", "--set", "layout.dp=4").json["families"]
    assert all(each["ranks"] == [0, 1, 2, 3] for each in families)
    assert any(".moe.w_up" in name for each in families for name in each["parameters"])


def test_the_table_says_who_holds_what(small: Path, moegraph: Moegraph) -> None:
    done = moegraph("inspect", small, "--shards", *LAYOUT)
    assert "edp: 4, 6" in done.out
    assert "experts.float32.0" in done.out
    done = moegraph("inspect", small, "--shards", "--kernels")
    assert done.status == 2
    assert "does not go with --shards" in done.err
