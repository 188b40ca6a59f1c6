"""Kernels against float64 references, in fp32, over group sizes 0, 1, one less and one more than a tile, all in one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moegraph import ops
from moegraph.kernels import dgrad_swiglu, move_rows, rows_gemm, up_swiglu, wgrad
from moegraph.kernels.activation import Activation
from moegraph.kernels.config import Config
from moegraph.kernels.tiles import tile_schedule, tile_schedule_reference
from moegraph.kernels.zero_tail import zero_tail
from tests.everyday import everyday
from tests.kernels.cases import Ragged, ragged, relative_error, routed

SMALL = Config(16, 32, 16, num_warps=4, num_stages=2)
ACTIVATIONS = {"swiglu": Activation(), "clamped": Activation(True, 1.7, 0.8)}
SIZES = [(0, 1, 15, 16, 17), (33, 0, 0, 0), (5,), (0, 0), (7, 40, 2)]
CASES = [pytest.param(ragged(s, tail), id=f"{s}+{tail}") for s in SIZES for tail in (0, 9) if sum(s) + tail]
# Widths that are whole tiles, and widths that are not.
WIDTHS = [(32, 32), (48, 40), (24, 72)]


def with_widths(*choices: Sequence[Any]) -> list[Any]:
    """Every group sizes with every combination of `choices`, each at one of the widths. They take turns so that each
    width meets each of the sizes and each combination, both with rows past the last offset and without."""
    combinations = list(itertools.product(*choices))
    return [
        pytest.param(case.values[0], *WIDTHS[(i + j) % 3], *values, id=f"{case.id}-{WIDTHS[(i + j) % 3]}-{values}")
        for i, case in enumerate(CASES)
        for j, values in enumerate(combinations)
    ]


def grouped(rows: Tensor, weight: Tensor, case: Ragged) -> Tensor:
    """float64: every row times the matrix of its expert, zero for rows that do not exist."""
    out = torch.zeros(case.rows, weight.shape[1], dtype=torch.float64)
    for r, e in enumerate(case.expert_of_row.tolist()):
        out[r] = weight[e].double() @ rows[r].double()
    return out


def poisoned(rows: Tensor, case: Ragged) -> Tensor:
    """Rows past the last offset hold NaN: they must not be felt."""
    rows = rows.clone()
    rows[case.rows - case.tail :] = float("nan")
    return rows


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("block_m", [16, 32])
@pytest.mark.parametrize("tail", [False, True])
def test_the_schedule_is_that_of_the_reference(case: Ragged, block_m: int, tail: bool) -> None:
    have = tile_schedule(case.offsets, case.rows, block_m, tail=tail)
    for a, b in zip(have, tile_schedule_reference(case.offsets, case.rows, block_m, tail=tail), strict=True):
        assert torch.equal(a, b)
    rows = case.rows if tail else case.rows - case.tail
    assert int((have.last - have.first).clamp(0, block_m).sum()) == rows  # no work for rows that do not exist


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", [(), (1,), (3, 5000)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_rows_that_do_not_exist_become_zeros_and_no_others(
    case: Ragged, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    outs = [torch.full((case.rows, *shape), 3.0).to(dtype) for _ in range(2)]
    zero_tail(case.offsets, *outs)
    for out in outs:
        assert (out[: case.rows - case.tail].float() == 3).all()
        assert (out[case.rows - case.tail :].float() == 0).all()


@pytest.mark.parametrize("case", everyday(CASES))
@pytest.mark.parametrize(("k", "n"), WIDTHS)
@pytest.mark.parametrize("parts", [1, 2])
def test_products_over_ragged_rows_and_their_input_gradients(case: Ragged, k: int, n: int, parts: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(len(case.sizes), n, k)
    rows, grad, scale = torch.randn(case.rows, k), torch.randn(case.rows, n), torch.rand(case.rows)
    bias, config = torch.randn(len(case.sizes), n), replace(SMALL, parts=parts)
    options = {"bias": bias, "row_weight": scale, "config": config}
    have = rows_gemm.grouped_mm(poisoned(rows, case), weight, case.offsets, **options)
    want = grouped(rows, weight, case)
    want[: case.rows - case.tail] += bias[case.expert_of_row].double()
    assert relative_error(have, want * scale.double()[:, None]) < 1e-6
    have = rows_gemm.grouped_mm(poisoned(grad, case), weight, case.offsets, transposed=True, config=config)
    assert relative_error(have, grouped(grad, weight.transpose(1, 2), case)) < 1e-6


@pytest.mark.parametrize("case", everyday(CASES))
@pytest.mark.parametrize(("k", "n"), WIDTHS)
def test_weight_gradients_and_what_they_are_added_to(case: Ragged, k: int, n: int) -> None:
    torch.manual_seed(0)
    rows, grad = torch.randn(case.rows, k), torch.randn(case.rows, n)
    want = torch.zeros(len(case.sizes), n, k, dtype=torch.float64)
    for r, e in enumerate(case.expert_of_row.tolist()):
        want[e] += torch.outer(grad[r].double(), rows[r].double())
    have = wgrad.wgrad(poisoned(grad, case), poisoned(rows, case), case.offsets, config=SMALL)
    assert relative_error(have, want) < 1e-6
    assert all((have[e] == 0).all() for e, size in enumerate(case.sizes) if size == 0)
    total = torch.randn_like(have)
    expected = total.double() + want
    wgrad.wgrad_into(grad, rows, case.offsets, total, accumulate=True, config=SMALL)
    assert relative_error(total, expected) < 1e-6
    total = torch.full_like(total, torch.nan)
    wgrad.wgrad_into(grad, rows, case.offsets, total, config=SMALL)
    assert relative_error(total, want) < 1e-6
    if case.tail:
        return
    total = torch.full_like(total, torch.nan, dtype=torch.float64)  # wider than the rows: written in parts
    wgrad.wgrad_into(grad, rows, case.offsets, total, config=SMALL)
    assert relative_error(total, want) < 1e-6


def activated(z: Tensor, activation: Activation) -> Tensor:
    """The operator that training differentiates, in z's dtype."""
    if activation.clamped:
        return ops.swiglu_clamped(z, alpha=activation.alpha, limit=activation.limit)
    return ops.swiglu(z)


@pytest.mark.parametrize(
    ("case", "d", "f", "name", "kind"),
    everyday(with_widths(list(ACTIVATIONS), ["plain", "biased", "biased, separate"])),
)
def test_the_gathered_up_projection_with_its_activation(case: Ragged, d: int, f: int, name: str, kind: str) -> None:
    torch.manual_seed(0)
    activation, biased, separate = ACTIVATIONS[name], "biased" in kind, "separate" in kind
    experts, rows = len(case.sizes), case.rows
    x, weight = torch.randn(rows, d), torch.randn(experts, 2 * f, d)  # one choice per token, in random order
    bias = torch.randn(experts, 2 * f) if biased else None
    order = torch.randperm(rows, dtype=torch.int32)
    inverse = torch.argsort(order).to(torch.int32)
    options = {"bias": bias, "activation": activation, "config": replace(SMALL, separate=separate)}
    z, act = up_swiglu.up_swiglu(x, order, inverse, weight, case.offsets, top_k=1, **options)
    want = grouped(x[order.long()], weight, case)
    if bias is not None:
        want[: rows - case.tail] += bias[case.expert_of_row].double()
    assert relative_error(z, want) < 1e-6
    assert relative_error(act, activated(want, activation)) < 1e-6


@pytest.mark.parametrize(
    ("case", "d", "f", "kind", "name"), everyday(with_widths(["1", "2", "4", "separate"], list(ACTIVATIONS)))
)
def test_the_gradient_through_down_activation_and_router_weight(
    case: Ragged, d: int, f: int, kind: str, name: str
) -> None:
    torch.manual_seed(0)
    activation = ACTIVATIONS[name]
    config = replace(SMALL, separate=True) if kind == "separate" else replace(SMALL, block_n=64, parts=int(kind))
    weight, grad = torch.randn(len(case.sizes), d, f), torch.randn(case.rows, d)
    z, scale = torch.randn(case.rows, 2 * f), torch.rand(case.rows)
    zz, ss = z.double().requires_grad_(), scale.double().requires_grad_()
    act = activated(zz, activation)
    real = torch.arange(case.rows) < case.rows - case.tail
    out = torch.zeros(case.rows, d, dtype=torch.float64)
    for r, e in enumerate(case.expert_of_row.tolist()):
        out[r] = ss[r] * (weight[e].double() @ act[r])
    if case.expert_of_row.numel():
        out.backward(grad.double())
    want_dz = torch.zeros_like(zz) if zz.grad is None else zz.grad
    want_ds = torch.zeros_like(ss) if ss.grad is None else ss.grad
    poison = (poisoned(grad, case), weight, poisoned(z, case), scale, case.offsets)
    dz, scaled, ds = dgrad_swiglu.dgrad_swiglu(*poison, activation=activation, config=config)
    assert relative_error(dz, want_dz) < 1e-6
    assert relative_error(ds, want_ds) < 1e-5
    assert relative_error(scaled, (act * ss[:, None]).detach() * real[:, None]) < 1e-6


@pytest.mark.parametrize("width", [32, 40, 1100])
@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_permute_and_combine_move_rows_bit_for_bit(width: int, top_k: int) -> None:
    order, inverse, offsets = routed(21, 5, top_k)
    x = torch.randn(21, width)
    rows = move_rows.permute(x, inverse, offsets, top_k)
    assert torch.equal(rows, x[order.long() // top_k])
    total = torch.zeros(21, width)
    for j in range(top_k):
        total += rows[inverse.view(-1, top_k)[:, j].long()]
    assert torch.equal(move_rows.combine(rows, inverse, offsets, top_k), total)


def test_permute_writes_zeros_and_combine_skips_rows_past_the_last_offset() -> None:
    _, inverse, offsets = routed(10, 4, 2)
    offsets = offsets.clamp(max=13)
    rows = move_rows.permute(torch.randn(10, 8), inverse, offsets, 2)
    assert (rows[13:] == 0).all()
    poisoned_rows = rows.clone()
    poisoned_rows[13:] = float("nan")
    assert torch.equal(
        move_rows.combine(poisoned_rows, inverse, offsets, 2), move_rows.combine(rows, inverse, offsets, 2)
    )


@pytest.mark.parametrize("top_k", [1, 3])
def test_weights_follow_their_rows_and_gradients_come_back(top_k: int) -> None:
    order, inverse, offsets = routed(21, 5, top_k)
    offsets = offsets.clamp(max=17 * top_k)
    weights, grad = torch.rand(21, top_k), torch.rand(21 * top_k)
    real = torch.arange(21 * top_k) < offsets[-1]
    rows = move_rows.gather_weights(weights, order, offsets)
    assert torch.equal(rows, torch.where(real, weights.reshape(-1)[order.long()], 0.0))
    grad[17 * top_k :] = float("nan")
    back = move_rows.gather_weights_backward(grad, inverse, offsets, top_k)
    assert torch.equal(back.reshape(-1), torch.where(real[inverse.long()], grad[inverse.long()], 0.0))


def test_no_tokens_give_empty_rows_and_zero_weight_gradients() -> None:
    offsets = torch.zeros(3, dtype=torch.int32)
    assert rows_gemm.grouped_mm(torch.empty(0, 16), torch.randn(3, 16, 16), offsets).shape == (0, 16)
    assert (wgrad.wgrad(torch.empty(0, 16), torch.empty(0, 16), offsets) == 0).all()
