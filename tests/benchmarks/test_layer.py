"""A block is timed beside peers from a file; a row that fails or is wrong says so and the others go on."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moegraph.benchmarks import layer, peers
from moegraph.benchmarks.results import LayerReport
from moegraph.benchmarks.shapes import Shape
from moegraph.benchmarks.timing import time_in_turn
from moegraph.errors import UsageError

CPU = torch.device("cpu")
PEERS_FILE = Path(__file__).with_name("peers_file.py")
SHAPE = Shape(tokens=64, d_model=32, d_ff=16, experts=4, top_k=2)


@pytest.fixture(autouse=True)
def forget_peers() -> Iterator[None]:
    yield
    for module in ("peers_file", "more_peers"):
        sys.modules.pop(module, None)


def time_small(*names: str, shape: Shape = SHAPE, **options: Any) -> LayerReport:
    found = peers.load_peers([PEERS_FILE], names) if names else []
    options = {"backward": True, "repeats": 2, "device": CPU, **options}
    return layer.time_layer(shape, peers=found, **options)


def test_rows_have_times_rates_shares_and_errors_that_fit_together() -> None:
    found = time_small("right", router=True)
    assert list(found.rows) == [
        "moegraph",
        "moegraph, separate operators",
        "moegraph, router and losses",
        "right",
        "dense 256³",
        "copy",
    ]
    assert not found.failed
    assert not found.wrong()
    for row in list(found.rows.values())[:4]:
        assert row.forward is not None
        assert row.forward_backward is not None
        assert row.error is not None
        assert row.error.keys() == (row.worst_tile or {}).keys()
        for timing, operations, which in (
            (row.forward, SHAPE.operations, "forward"),
            (row.forward_backward, 3 * SHAPE.operations, "forward_backward"),
        ):
            assert timing.least_milliseconds <= timing.milliseconds
            assert timing.tflops == pytest.approx(operations / timing.milliseconds / 1e9)
            assert timing.share_of_dense == pytest.approx(timing.tflops * 1e12 / found.dense_rate)
            floor = found.floor_bytes[which] / found.copy_bytes_per_second * 1e3
            assert timing.share_of_floor == pytest.approx(floor / timing.milliseconds)
    assert found.rows["dense 256³"].forward.share_of_dense == pytest.approx(1.0)  # type: ignore[union-attr]
    assert found.rows["right"].agreement is not None
    assert found.rows["moegraph, router and losses"].agreement is None
    assert found.rows["moegraph"].saved_bytes is None  # the CPU does not tell


def test_forward_alone_has_no_backward_times() -> None:
    found = time_small("right", "products", backward=False, error=False)
    assert all(row.forward_backward is None for row in found.rows.values())
    assert all(row.error is None for row in found.rows.values())
    assert found.rows["right"].forward is not None


def test_products_alone_are_timed_without_errors() -> None:
    found = time_small("products")
    row = found.rows["products"]
    assert row.forward is not None
    assert row.forward_backward is not None
    assert row.error is None
    assert row.agreement is None


def test_a_peer_without_backward_has_a_forward_row() -> None:
    row = time_small("forward only").rows["forward only"]
    assert row.forward is not None
    assert row.forward_backward is None
    assert set(row.error or {}) == {"out"}


@pytest.mark.parametrize(
    ("name", "reason"), [("broken", "RuntimeError: no such chip"), ("later", "ValueError: worn out")]
)
def test_a_failing_peer_says_why_and_the_others_go_on(name: str, reason: str) -> None:
    said: list[str] = []
    found = time_small(name, "right", repeats=8, report=said.append)
    assert found.failed[name]["reason"] == reason
    assert "peers_file.py" in found.failed[name]["traceback"]
    assert f"{name} failed: {reason}" in said
    assert found.rows["right"].forward_backward is not None


def test_a_wrong_peer_is_named_with_the_value_that_is_wrong() -> None:
    found = time_small("wrong", "right")
    assert set(found.wrong()) == {"wrong"}
    assert [text.rsplit(" ", 1)[0] for text in found.wrong()["wrong"]] == ["dw_up", "a tile of dw_up", "agreement"]


def test_a_peer_is_told_the_shape() -> None:
    time_small("right", shape=Shape(64, 32, 16, 4, 2, skew=0.5), error=False)
    assert sys.modules["peers_file"].calls == [("right", (64, 32, 16, 4, 2, 0.5))]


def test_errors_are_measured_at_fewer_tokens_where_all_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer._Run, "_fits", lambda self, shape: shape.tokens < 400)
    shape = Shape(1024, 32, 16, 4, 2)
    found = time_small("right", shape=shape)
    assert found.error_tokens == 256
    assert [cfg[0] for _, cfg in sys.modules["peers_file"].calls] == [256, 1024]
    assert not found.wrong()


def test_fp32_has_smaller_errors_than_bf16() -> None:
    bf16, fp32 = (time_small(dtype=dtype).rows["moegraph"].error for dtype in (torch.bfloat16, torch.float32))
    assert max((fp32 or {}).values()) < 1e-5 < min((bf16 or {}).values())


def test_jobs_run_in_turn_and_rotate_over_their_inputs() -> None:
    log: list[tuple[str, int]] = []
    jobs = {name: (lambda count, name=name: log.append((name, count))) for name in "ab"}
    times = time_in_turn(jobs, CPU, repeats=2, in_a_row=2, warm_seconds=0.0)
    assert [len(each) for each in times.values()] == [4, 4]
    warm, counted = log[:2], log[2:]
    assert warm == [("a", 0), ("b", 0)]
    assert counted == [(name, 3 * turn + again) for turn in range(2) for name in "ab" for again in range(3)]


def test_a_file_may_import_another_peers_file(tmp_path: Path) -> None:
    more = tmp_path / "more_peers.py"
    more.write_text("import peers_file\nclass Mine(peers_file.Peer):\n    name = 'mine'\n")
    assert [peer.name for peer in peers.load_peers([PEERS_FILE, more], ["mine", "right"])] == ["mine", "right"]


@pytest.mark.parametrize(
    ("text", "names", "sentence"),
    [
        ("x = 1", ["a"], "--peers a is not in --peers-file .*no peer at all"),
        ("raise SystemExit('no')", ["a"], "fails when it is run: SystemExit: no"),
        (PEERS_FILE.read_text(), [], "--peers NAMES is needed with .*right, forward only, wrong"),
    ],
)
def test_a_file_that_does_not_do_is_refused(tmp_path: Path, text: str, names: list[str], sentence: str) -> None:
    file = tmp_path / "more_peers.py"
    file.write_text(text)
    with pytest.raises(UsageError, match=sentence):
        peers.load_peers([file], names)


def test_a_file_that_is_not_there_or_has_a_taken_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no Python file is there"):
        peers.load_peers([tmp_path / "more_peers.py"], ["a"])
    (tmp_path / "torch.py").write_text("")
    with pytest.raises(UsageError, match="a module torch is imported already"):
        peers.load_peers([tmp_path / "torch.py"], ["a"])
    assert importlib.util.find_spec("torch") is not None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("compiled", [True, False])
def test_every_row_runs_on_a_gpu(compiled: bool) -> None:
    cuda = torch.device("cuda")
    shape = Shape(tokens=2048, d_model=512, d_ff=256, experts=8, top_k=2)
    found = time_small("right", shape=shape, device=cuda, compiled=compiled, graph=True, router=True)
    assert not found.failed
    assert not found.wrong()
    ours = [row for name, row in found.rows.items() if name.startswith("moegraph")]
    assert len(ours) == 6
    for row in ours:
        assert row.forward is not None
        assert row.forward_backward is not None
        if "graph" not in row.name:
            assert row.error is not None
            assert row.saved_bytes is not None
            assert row.saved_bytes > 0
            assert row.peak_bytes is not None
    z = shape.rows * 2 * shape.d_ff * 2
    assert z <= (found.rows["moegraph"].saved_bytes or 0) < 1.2 * z
    assert found.rows["dense 8192³"].forward is not None
