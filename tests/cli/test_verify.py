"""`moegraph verify` shows what was proved, and ends with 3 when something was not."""

from __future__ import annotations

from pathlib import Path

import pytest

from moegraph.verify.passes import PassVerdict, VerifyReport
from moegraph.verify.stages import StageProof

from .conftest import Moegraph


def verdict(name: str, difference: float, ok: bool, first: str | None) -> PassVerdict:
    return PassVerdict(name, "exact", 0.0, 2, difference, 0.0, ok, "", first, True)


def test_every_pass_is_a_row_and_the_differences_are_zero(small: Path, moegraph: Moegraph) -> None:
    done = moegraph("verify")
    assert done.status == 0, done.err
    rows = {line.split()[0]: line.split() for line in done.out.splitlines() if line}
    assert rows["balance-losses"][1:7] == ["exact", "0.0", "2", "0.0", "0.0", "found"]
    assert rows["split-backward"][-1] == "ok"
    assert "rewritten by balance-losses in moe: moe.balance_loss, moe.z_loss\n" in done.out
    found = {row["name"]: row["nodes"] for row in moegraph("verify", "--json").json["passes"]}
    assert found["balance-losses"] == {"moe": ["moe.balance_loss", "moe.z_loss"]}


def test_a_breach_ends_with_3_and_names_the_first_node(
    small: Path, moegraph: Moegraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [verdict("canonicalize", 0.0, True, None), verdict("recompute", float("nan"), False, "moe: moe.route/topk")]
    monkeypatch.setattr("moegraph.verify.passes.verify_spec", lambda spec, **_: VerifyReport(rows, ""))
    done = moegraph("verify")
    assert done.status == 3
    assert "FAILED" in done.out
    assert done.err == "error: pass 'recompute' does not hold: the first node that differs is moe: moe.route/topk\n"
    done = moegraph("verify", "--json")
    assert (done.status, done.json["ok"]) == (3, False)
    assert done.json["passes"][1]["output_difference"] is None


def test_a_world_is_proved_and_its_layout_and_collectives_are_said(small: Path, moegraph: Moegraph) -> None:
    done = moegraph("verify", "--world", "2")
    assert done.status == 0, done.err
    first, second, *_ = done.out.splitlines()
    assert first == "proved at world 2 = dp 2 × pp 1, ep 2, transport padded, capacity 2, overflow replay"
    assert second == (
        "stage 0 on ranks 0-1 (embedding, layers.0, layers.1, head): group ep, 4 collectives forward and 3 backward "
        "per micro-batch, in one order on all 2 ranks; no host synchronisation"
    )
    rows = {line.split()[0]: line.split() for line in done.out.splitlines() if line}
    assert rows["dispatch-experts"][1:3] == ["close", "1.0e-04"]
    assert rows["dispatch-experts"][6:8] == ["found", "ok"]
    data = moegraph("verify", "--world", "2", "--json").json
    assert data["layout"] == first.removeprefix("proved at ")
    assert [(each["group"], each["size"], each["ok"]) for each in data["stages"]] == [("ep", 2, True)]


def test_a_stage_that_does_not_hold_ends_with_3(
    small: Path, moegraph: Moegraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = [StageProof(1, (2, 3), "layers.1", "ep", 2, 4, 3, 0, "collectives differ between ranks: at moe.x")]
    report = VerifyReport([verdict("canonicalize", 0.0, True, None)], "", layout="world 4", stages=stages)
    monkeypatch.setattr("moegraph.verify.passes.verify_spec", lambda spec, **_: report)
    done = moegraph("verify", "--world", "4")
    assert done.status == 3
    assert "collectives do not hold: stage 1 on ranks 2-3 (layers.1): collectives differ" in done.err
    assert moegraph("verify", "--json").json["stages"][0]["ok"] is False


@pytest.mark.parametrize("world", ["0", "-1", "4097", "many"])
def test_a_world_that_cannot_be_is_refused(small: Path, moegraph: Moegraph, world: str) -> None:
    done = moegraph("verify", "--world", world)
    assert done.status == 2
    assert "--world" in done.err
