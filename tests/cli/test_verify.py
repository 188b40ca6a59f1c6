"""`moegraph verify` shows what was proved, and ends with 3 when something was not."""

from __future__ import annotations

from pathlib import Path

import pytest

from moegraph.verify.passes import PassVerdict, VerifyReport

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
