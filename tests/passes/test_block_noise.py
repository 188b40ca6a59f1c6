"""A whole block in 8 bits against the same block in float64, with the router's choices held fixed: SQNR in dB.

The bounds are about 1 dB below the worst of three seeds. They are lower than a product's 28 dB, because the errors
of what a tensor is made of meet in it, and lowest where a gradient is a difference of large numbers: queries and keys
behind the softmax, router weights.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moegraph.graph.program import Port, Unit
from moegraph.verify.compare import sqnr
from moegraph.verify.inputs import random_inputs
from moegraph.verify.run import run_graph
from tests.small_models import compile_once, small_spec

SIZES = (
    *("model.d_model=256", "model.moe.d_ff=128", "model.attention.num_kv_heads=4"),
    *("model.num_layers=1", "model.dense=null", "passes.fuse-experts.enabled=true"),
)
MX = "precision.mxfp8={experts: 'on', shared: 'on', attention: 'on', wgrad: mxfp8}"
SLOW = pytest.mark.slow
# Least dB of the output, the gradient of the input, and the worst weight.
BOUNDS = {
    "bf16": ((), (46.0, 44.0, 40.0)),
    "mxfp8 everywhere": ((MX,), (25.0, 22.5, 18.0)),
    "mxfp8 experts": (("precision.mxfp8.experts='on'",), (36.0, 33.0, 21.5)),
    "fp8 rowwise": (("precision.fp8=rowwise", "precision.fp8_wgrad=true"), (36.5, 33.5, 22.0)),
    "fp8 blockwise": (("precision.fp8=blockwise",), (36.0, 33.0, 21.0)),
}


def block(name: str, *overrides: str) -> Unit:
    """The block with experts, as joint graphs after the pass of that name."""
    units = compile_once(small_spec(*SIZES, *overrides)).record(name).program.units
    return next(unit for kind, unit in units.items() if "embedding" not in kind and "head" not in kind)


def block_inputs(low: Unit, seed: int) -> dict[Port, Tensor]:
    """Random inputs of the block in bf16."""
    return random_inputs(compile_once(small_spec(*SIZES, "precision.compute=bf16")).program, low.layer_graph, seed)


def noise(overrides: tuple[str, ...], seed: int) -> dict[Port, float]:
    """SQNR of every output and gradient of the block, against the float64 of the same bf16 inputs."""
    name = "trace" if not overrides else "cast-mxfp8" if "mxfp8" in overrides[0] else "cast-fp8"
    exact, low = block("trace"), block(name, "precision.compute=bf16", *overrides)
    inputs = block_inputs(low, seed)
    wide = {port: value.double() if value.is_floating_point() else value for port, value in inputs.items()}
    want = run_graph(exact.graphs["joint"], wide)
    have = run_graph(low.graphs["joint"], inputs, want.values)
    pairs = {port: (value, have.results[port]) for port, value in want.results.items() if value.is_floating_point()}
    return {port: sqnr(*pair) for port, pair in pairs.items()}


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=SLOW), pytest.param(2, marks=SLOW)])
@pytest.mark.parametrize("recipe", [pytest.param(r, marks=() if r == "mxfp8 everywhere" else SLOW) for r in BOUNDS])
def test_a_block_stays_within_what_was_measured(recipe: str, seed: int) -> None:
    overrides, (output, grad_input, weight) = BOUNDS[recipe]
    found = noise(overrides, seed)
    worst = min(value for port, value in found.items() if port.role == "grad")
    assert found[Port("hidden", "hidden")] >= output
    assert found[Port("grad_input", "hidden")] >= grad_input
    assert worst >= weight
    if overrides:
        assert worst < BOUNDS["bf16"][1][2] - 10  # the cast has happened


@pytest.mark.parametrize(
    "overrides",
    [(MX,), *(pytest.param(BOUNDS[recipe][0], marks=SLOW) for recipe in ("fp8 rowwise", "fp8 blockwise"))],
)
def test_a33_zero_tokens_and_experts_of_zeros_give_no_nan_forward_or_backward(overrides: tuple[str, ...]) -> None:
    low = block("cast-mxfp8" if "mxfp8" in overrides[0] else "cast-fp8", "precision.compute=bf16", *overrides)
    inputs = block_inputs(low, 0)
    inputs[Port("input", "hidden")][::3] = 0
    inputs[Port("tangent", "hidden")][1::3] = 0
    for name in ("w_up", "w_down"):
        inputs[Port("parameter", f"moe.{name}")][:4] = 0  # half of the experts
        inputs[Port("parameter", f"shared.{name}")].zero_()
    found = run_graph(low.graphs["joint"], inputs)
    for port, value in found.results.items():
        assert value.isfinite().all(), port
    assert found.results[Port("grad", "moe.w_up")][4:].any()
    weights = {name: value for name, value in found.values.items() if "quantize" in name and value[0].dim() == 3}
    assert len(weights) == 4
    for name, (data, scale) in weights.items():
        assert not data[:4].view(torch.uint8).any(), name
        assert (scale[:4] == (0 if scale.dtype == torch.uint8 else 1)).all(), name
        assert data[4:].view(torch.uint8).any(), name
