"""`moegraph bench`: figures of a step come with the numbers that make them, and calls that cannot work are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from .conftest import Moegraph


def test_a_step_is_timed_and_its_figures_agree(small: Path, moegraph: Moegraph) -> None:
    done = moegraph("bench", "step", "--steps", "2", "--set", "train.compile=eager", "--json")
    assert done.status == 0, done.err
    found = json.loads(done.out)
    assert found["least_milliseconds"] <= found["milliseconds"]
    assert found["tokens_per_second"] > 0
    assert found["loss"] == pytest.approx(found["loss"])
    assert found["active_parameters"] <= found["parameters"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["layer", "--preset", "Z"], "one of A, C, D, Q, wide"),
        (["layer", "--experts", "4", "--top-k", "5"], "--top-k 5 is more than --experts 4"),
        (["step", "presets/olmo3-47b.yaml"], "layout asks for 8 ranks"),
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
