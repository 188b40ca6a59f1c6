"""`moegraph bench`: figures come with the numbers that make them, and calls that cannot work are refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from .conftest import Moegraph

PEERS_FILE = Path(__file__).parents[1] / "benchmarks" / "peers_file.py"
SMALL_LAYER = (
    *("bench", "layer", "--device", "cpu", "--tokens", "64", "--d-model", "32", "--d-ff", "16"),
    *("--experts", "4", "--top-k", "2", "--repeats", "1", "--backward"),
)


@pytest.fixture(autouse=True)
def forget_peers() -> Iterator[None]:
    yield
    sys.modules.pop("peers_file", None)


def test_a_step_is_timed_and_its_figures_agree(small: Path, moegraph: Moegraph) -> None:
    done = moegraph("bench", "step", "--steps", "2", "--set", "train.compile=eager", "--json")
    assert done.status == 0, done.err
    found = json.loads(done.out)
    assert found["least_milliseconds"] <= found["milliseconds"]
    assert found["tokens_per_second"] > 0
    assert found["loss"] == pytest.approx(found["loss"])
    assert found["active_parameters"] <= found["parameters"]


def test_a_layer_is_timed_for_several_presets_beside_peers_as_json(moegraph: Moegraph) -> None:
    peers = ("--peers", "right,products", "--peers-file", PEERS_FILE)
    done = moegraph(*SMALL_LAYER, "--preset", "A,wide", "--skew", "0.5", *peers, "--json")
    assert done.status == 0, done.err
    a, wide = done.json["presets"]
    assert [a["preset"], wide["preset"]] == ["A", "wide"]
    names = ["moegraph", "moegraph, separate operators", "right", "products", "dense 256³", "copy"]
    assert [row["name"] for row in a["rows"]] == names
    assert "moegraph, router and losses" in [row["name"] for row in wide["rows"]]
    assert a["shape"] == {"tokens": 64, "d_model": 32, "d_ff": 16, "experts": 4, "top_k": 2, "skew": 0.5}
    assert a["dtype"] == "bfloat16"
    assert a["compiled"] is False
    assert a["error_tokens"] == 64
    assert a["failed"] == a["wrong"] == {}
    assert set(a["floor_bytes"]) == {"forward", "forward_backward"}
    for key in ("dense_rate_before", "dense_rate", "dense_rate_after", "copy_bytes_per_second"):
        assert a[key] > 0
    row = a["rows"][0]
    timing = {"milliseconds", "least_milliseconds", "tflops", "share_of_dense", "share_of_floor"}
    assert set(row["forward"]) == set(row["forward_backward"]) == timing
    assert set(row["error"]) == set(row["worst_tile"]) == {"out", "dx", "dlogits", "dw_up", "dw_down"}
    assert "a peer that prints" in done.err


def test_a_layer_prints_a_table_and_a_broken_peer_its_reason(moegraph: Moegraph) -> None:
    done = moegraph(*SMALL_LAYER, "--peers", "broken,right", "--peers-file", PEERS_FILE)
    assert done.status == 1
    assert "broken failed: RuntimeError: no such chip" in done.out
    assert "broken failed: RuntimeError: no such chip" in done.err
    lines = done.out.splitlines()
    assert any(line.startswith("forward") and "fwd+bwd ms" in line and "of floor" in line for line in lines)
    assert sum(line.startswith("right") for line in lines) == 2
    assert "float64" in done.out


def test_a_wrong_peer_ends_with_status_3(moegraph: Moegraph) -> None:
    done = moegraph(*SMALL_LAYER, "--peers", "wrong", "--peers-file", PEERS_FILE)
    assert done.status == 3
    assert "preset A, wrong: not right, dw_up" in done.err


def test_a_layer_without_errors_has_no_error_columns(moegraph: Moegraph) -> None:
    done = moegraph(*SMALL_LAYER, "--no-error", "--dtype", "fp32")
    assert done.status == 0, done.err
    assert "float32, eager" in done.out
    assert "float64" not in done.out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["layer", "--preset", "Z"], "--preset Z: A, C, D, Q, wide, one or several with commas between"),
        (["layer", "--experts", "4", "--top-k", "5"], "--top-k 5 is more than --experts 4"),
        (["layer", "--peers", "sonic"], "--peers sonic needs --peers-file FILE"),
        (["layer", "--peers-file", PEERS_FILE, "--device", "cpu"], "--peers NAMES is needed with --peers-file"),
        (["layer", "--graph", "--device", "cpu"], "--graph replays CUDA graphs"),
        (["step", "presets/olmo3-47b.yaml"], "the layout has 8 ranks and no --nproc is given"),
    ],
)
def test_a_call_that_cannot_work_is_refused(moegraph: Moegraph, arguments: list[str], sentence: str) -> None:
    done = moegraph("bench", *arguments)
    assert done.status == 2
    assert sentence in done.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_layer_needs_a_cuda_device_and_says_so(moegraph: Moegraph) -> None:
    done = moegraph("bench", "layer")
    assert done.status == 1
    assert "CUDA" in done.err


@pytest.mark.slow
def test_dispatch_between_two_ranks_is_timed_in_every_way_and_gives_the_same_bits() -> None:
    """Processes of their own: as from a shell."""
    sizes = ("--tokens", "32", "--d-model", "32", "--experts", "4", "--top-k", "2", "--repeats", "1")
    command = [
        sys.executable,
        "-m",
        "moegraph",
        "bench",
        "dispatch",
        "--device",
        "cpu",
        "--nproc",
        "2",
        *sizes,
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["equal"] == {"direct": True, "nccl, sizes read": True, "direct, mxfp8": True}
    assert len(found["rows"]) == 12
    assert all(0 < row["least_milliseconds"] <= row["milliseconds"] for row in found["rows"])
    assert found["shape"]["ranks"] == 2
    assert {"torch", "triton"} <= found["versions"].keys()


def test_dispatch_that_cannot_work_is_refused(moegraph: Moegraph) -> None:
    for options, said in (
        (("--experts", "3"), "divide"),
        (("--experts", "4", "--top-k", "5"), "more than --experts 4"),
    ):
        done = moegraph("bench", "dispatch", "--device", "cpu", *options)
        assert done.status == 2
        assert said in done.err


def test_a_layer_in_fp8_is_timed_with_its_casts_and_noise(moegraph: Moegraph) -> None:
    done = moegraph(*SMALL_LAYER, "--precision", "bf16,fp8,fp8-wgrad", "--json")
    assert done.status == 0, done.err
    rows = {row["name"]: row for row in json.loads(done.out)["presets"][0]["rows"]}
    assert rows["moegraph"]["forward_cast"] is None
    for name in ("fp8", "fp8-wgrad"):
        assert rows[name]["forward_cast"]["milliseconds"] > 0
        assert rows[name]["forward_backward_cast"]["milliseconds"] > 0
    table = moegraph(*SMALL_LAYER, "--precision", "fp8")
    assert table.status == 0, table.err
    assert "SQNR in dB" in table.out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--precision", "fp4"], "--precision fp4: bf16, fp8, fp8-wgrad, mxfp8"),
        (["--precision", "bf16", "--compile-only"], "--compile-only goes with --precision mxfp8"),
        (["--precision", "mxfp8,fp8", "--compile-only"], "--compile-only goes with --precision mxfp8"),
        (["--precision", "fp8", "--arch", "sm_103"], "--arch goes with --compile-only"),
        (["--precision", "fp8", "--dtype", "fp32"], "it cannot go with --dtype fp32"),
        (["--precision", "mxfp8", "--compile-only", "--d-ff", "96"], "96 columns and a contraction over"),
    ],
)
def test_precisions_that_do_not_go_together_are_refused(
    moegraph: Moegraph, arguments: list[str], sentence: str
) -> None:
    done = moegraph("bench", "layer", "--device", "cpu", *arguments)
    assert done.status == 2
    assert sentence in done.err


def test_the_kernels_of_mxfp8_are_compiled_for_a_chip_that_is_not_here(moegraph: Moegraph) -> None:
    sizes = ("--tokens", "512", "--d-model", "256", "--d-ff", "128", "--experts", "4", "--top-k", "2")
    options = ("--precision", "mxfp8", "--arch", "sm_103", "--compile-only", "--json")
    done = moegraph("bench", "layer", *sizes, *options)
    assert done.status == 0, done.err
    kernels = json.loads(done.out)["presets"]["A"]
    products = {"up_swiglu", "down", "dgrad_swiglu", "up_dgrad"}
    assert kernels.keys() > products | {"permute_quantize"}
    assert not [name for name in kernels if name.startswith("quantize") and name.count(",") < 2]  # weights alone
    for name, report in kernels.items():
        assert report["fits"], name
        assert report["matrix_instruction"] == ("tcgen05.mma" if name in products else "none")


def test_a_checkpoint_is_timed_and_removed(tmp_path: Path, moegraph: Moegraph) -> None:
    done = moegraph("bench", "checkpoint", tmp_path, "--gib", "0.02", "--rounds", "1", "--json")
    assert done.status == 0, done.err
    found = done.json
    assert found["bytes"] == pytest.approx(0.02 * 2**30, rel=1e-3)
    assert found["save_share"] == pytest.approx(found["disk"] / found["save"])
    assert found["verify_more"] == pytest.approx(found["load_verified"] / found["load"] - 1)
    assert found["stall_share"] == pytest.approx(found["copy"] / found["save"])
    assert found["step"] > 0
    assert found["step_longest"] >= found["step_beside"] > 0
    assert found["device"].startswith("CPU")
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_does_not_fit_is_not_begun(
    tmp_path: Path, moegraph: Moegraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moegraph.benchmarks import checkpoint

    monkeypatch.setattr(checkpoint, "free_bytes", lambda folder: 1 << 30)
    done = moegraph("bench", "checkpoint", tmp_path, "--gib", "4")
    assert done.status == 1
    assert "has not the room for two times 4 GiB" in done.err
    assert moegraph("bench", "checkpoint", tmp_path / "nowhere").status == 2
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    done = moegraph("bench", "checkpoint", tmp_path, "--device", "cuda")
    assert (done.status, "torch sees no CUDA device" in done.err) == (2, True)


@pytest.mark.parametrize(
    ("option", "sentence"), [("--balanced", "has no effect: this model has no experts"), ("--kernels=3", "needs a GPU")]
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels can be listed here")
def test_options_of_a_step_that_would_do_nothing_are_refused(moegraph: Moegraph, option: str, sentence: str) -> None:
    done = moegraph("bench", "step", "presets/tiny-dense.yaml", option)
    assert done.status == 2
    assert sentence in done.err
