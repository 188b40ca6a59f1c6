"""The float64 reference is autograd's block, and an error names the value and the tile that are wrong."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moegraph import ops
from moegraph.benchmarks.blocks import Fused, Routed
from moegraph.benchmarks.candidate import Candidate
from moegraph.benchmarks.inputs import Inputs, experts_with_rows, make_inputs, make_weights
from moegraph.benchmarks.reference import Difference, Result, largest_difference, measure_errors
from moegraph.benchmarks.shapes import Shape

CPU = torch.device("cpu")
SHAPE = Shape(tokens=70, d_model=24, d_ff=16, experts=5, top_k=2, skew=0.5)


def dense(x: Tensor, logits: Tensor, w_up: Tensor, w_down: Tensor, top_k: int) -> Tensor:
    """Every expert on every token, weighted by a softmax that is zero outside the top k."""
    kth = logits.topk(top_k, -1).values[:, -1:]
    weights = torch.softmax(logits.masked_fill(logits < kth, -math.inf), -1)
    gate, up = torch.einsum("td,efd->tef", x, w_up).chunk(2, -1)
    return torch.einsum("tef,edf,te->td", F.silu(gate) * up, w_down, weights)


def wide() -> tuple[Inputs, Tensor, Tensor]:
    (inputs,) = make_inputs(SHAPE, torch.float64, CPU, sets=1)
    logits = inputs.logits.detach().double().requires_grad_()
    return inputs._replace(logits=logits), *make_weights(SHAPE, torch.float64, CPU)


def exact() -> tuple[Result, Inputs, Tensor, Tensor]:
    inputs, w_up, w_down = wide()
    out = dense(inputs.x, inputs.logits, w_up, w_down, SHAPE.top_k)
    grads = torch.autograd.grad(out, [inputs.x, inputs.logits, w_up, w_down], inputs.grad)
    return Result(out.detach(), *grads), inputs, w_up, w_down


def test_autograd_in_float64_has_no_error() -> None:
    errors = measure_errors(*exact(), SHAPE.top_k)
    assert set(errors.relative) == {"out", "dx", "dlogits", "dw_up", "dw_down"}
    assert errors.largest < 1e-13
    assert max(errors.worst_tile.values()) < 1e-12


def test_a_router_of_its_own_with_losses_has_no_error() -> None:
    inputs, w_up, w_down = wide()
    candidate = Candidate(Routed(compiled=False), SHAPE, w_up, w_down)
    errors = measure_errors(candidate.run(inputs), inputs, w_up, w_down, SHAPE.top_k, candidate.router(inputs))
    assert set(errors.relative) == {"out", "dx", "dw_router", "dw_up", "dw_down"}
    assert errors.largest < 1e-12


@pytest.mark.parametrize("place", range(5))
def test_one_wrong_value_is_named(place: int) -> None:
    have, *rest = exact()
    planted = [value.clone(memory_format=torch.contiguous_format) for value in have if value is not None]
    planted[place].view(-1)[3] += 100.0
    errors = measure_errors(Result(*planted), *rest, SHAPE.top_k)
    wrong = {name for name, value in errors.relative.items() if value > 1e-6}
    assert wrong == {("out", "dx", "dlogits", "dw_up", "dw_down")[place]}


def test_a_tile_that_was_not_written_shows_where_the_norm_hides_it() -> None:
    want = torch.randn(2048, 2048)
    have = want.clone()
    have[256:384, 128:256] = 0.0
    difference = Difference()
    difference.add(have, want)
    assert difference.relative() == pytest.approx(1 / 16, rel=0.05)
    assert difference.worst_tile() == pytest.approx(1.0)


def test_numbers_where_zeros_are_right_are_an_infinite_error_and_nan_stays() -> None:
    zeros = Difference()
    zeros.add(torch.ones(3, 3), torch.zeros(3, 3))
    assert zeros.relative() == zeros.worst_tile() == math.inf
    nan = Difference()
    nan.add(torch.tensor([[math.nan, 1.0]]), torch.ones(1, 2))
    assert math.isnan(nan.relative())
    assert math.isnan(nan.worst_tile())


def test_a_value_of_another_shape_is_refused() -> None:
    have, *rest = exact()
    with pytest.raises(ValueError, match="shape"):
        measure_errors(have._replace(out=have.out[1:]), *rest, SHAPE.top_k)


def test_a_block_without_backward_has_an_error_of_its_output_alone() -> None:
    have, *rest = exact()
    assert set(measure_errors(Result(have.out), *rest, SHAPE.top_k).relative) == {"out"}
    assert largest_difference(Result(have.out), have) == 0.0


def test_bfloat16_is_within_rounding() -> None:
    (inputs,) = make_inputs(SHAPE, torch.bfloat16, CPU, sets=1)
    weights = make_weights(SHAPE, torch.bfloat16, CPU)
    have = Candidate(Fused(compiled=False), SHAPE, *weights).run(inputs)
    assert 1e-4 < measure_errors(have, inputs, *weights, SHAPE.top_k).largest < 1e-2


def test_no_choice_of_an_expert_hangs_on_rounding() -> None:
    many = Shape(tokens=20000, d_model=8, d_ff=8, experts=64, top_k=8)
    for inputs in make_inputs(many, torch.bfloat16, CPU, sets=2):
        best = inputs.logits.detach().topk(9, -1).values
        assert float((best[:, 7] - best[:, 8]).min()) > 9e-4
        assert torch.equal(
            ops.choose_experts(inputs.logits, 8).sort(-1).values,
            inputs.logits.to(torch.float64).topk(8, -1).indices.int().sort(-1).values,
        )


def test_experts_with_rows_are_counted() -> None:
    few = Shape(tokens=1, d_model=8, d_ff=8, experts=64, top_k=8)
    assert experts_with_rows(few, make_inputs(few, torch.bfloat16, CPU)) == 8
