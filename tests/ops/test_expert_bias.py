"""Biases of experts at every group size, and the clamped SwiGLU at its limits."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from torch import Tensor

from moegraph import ops

SIZES = [(0, 1, 7, 0), (5,), (0, 0), (300, 0, 0), (1, 1, 1), (64, 200, 3)]
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")],
    ),
]
N = 6


def offsets_of(sizes: tuple[int, ...], device: str = "cpu") -> Tensor:
    return torch.tensor(list(accumulate(sizes)), dtype=torch.int32, device=device)


def experts_of(sizes: tuple[int, ...], device: str = "cpu") -> Tensor:
    return torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)).to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tail", [0, 3])
@pytest.mark.parametrize("sizes", SIZES)
def test_each_row_gets_the_bias_of_its_expert_and_each_bias_the_sum_of_its_rows(
    sizes: tuple[int, ...], tail: int, device: str
) -> None:
    torch.manual_seed(0)
    total, which = sum(sizes), experts_of(sizes, device)
    rows, grad = torch.randn(2, total + tail, N, dtype=torch.float64, device=device).unbind()
    bias = torch.randn(len(sizes), N, dtype=torch.float64, device=device, requires_grad=True)
    want = torch.zeros_like(rows)
    want[:total] = rows[:total] + bias.detach()[which]
    rows[total:], grad[total:] = float("nan"), float("nan")  # rows that do not exist are never read
    rows.requires_grad_()
    out = ops.add_expert_bias(rows, bias, offsets_of(sizes, device))
    assert torch.equal(out, want)
    grad_rows, grad_bias = torch.autograd.grad(out, (rows, bias), grad)
    assert torch.equal(grad_rows[:total], grad[:total])
    assert not grad_rows[total:].any()
    expected = torch.zeros_like(bias).index_add(0, which, grad[:total])
    torch.testing.assert_close(grad_bias, expected, rtol=1e-13, atol=1e-13)
    for expert, size in enumerate(sizes):
        if size == 0:
            assert grad_bias[expert].eq(0).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_gradient_is_summed_wide_and_the_same_every_time(dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    sizes = (4096, 0, 1, 2000)
    grad = (torch.randn(sum(sizes) + 5, 200, device=device) + 1.0).to(dtype)
    offsets = offsets_of(sizes, device)
    found = ops.expert_bias_wgrad(grad, offsets)
    assert found.dtype == dtype
    want = torch.zeros(4, 200, dtype=torch.float64, device=device)
    want.index_add_(0, experts_of(sizes, device), grad[: sum(sizes)].double())
    # Summed in bf16 it would stop growing at 256.
    torch.testing.assert_close(found.double(), want, rtol=2**-8 if dtype == torch.bfloat16 else 1e-5, atol=1e-2)
    assert all(torch.equal(found, ops.expert_bias_wgrad(grad, offsets)) for _ in range(3))


@pytest.mark.parametrize("device", DEVICES)
def test_expanded_gradients_and_no_rows_at_all_are_accepted(device: str) -> None:
    grad = torch.ones(1, 1, device=device).expand(9, 4)
    assert ops.expert_bias_wgrad(grad, offsets_of((2, 7), device)).tolist() == [[2.0] * 4, [7.0] * 4]
    none = torch.empty(0, 4, device=device)
    assert ops.add_expert_bias(none, torch.ones(2, 4, device=device), offsets_of((0, 0), device)).shape == (0, 4)
    assert ops.expert_bias_wgrad(none, offsets_of((0, 0), device)).tolist() == [[0.0] * 4] * 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_nothing_waits_for_the_device(dtype: torch.dtype) -> None:
    rows = torch.randn(5000, 256, device="cuda").to(dtype).requires_grad_()
    bias = torch.randn(3, 256, device="cuda").to(dtype).requires_grad_()
    offsets = offsets_of((1000, 0, 3900), "cuda")

    def once() -> None:
        out = ops.add_expert_bias(rows, bias, offsets)
        torch.autograd.grad(out, (rows, bias), torch.ones_like(out))

    once()
    torch.cuda.set_sync_debug_mode("error")
    try:
        once()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_bias_that_does_not_fit_is_refused() -> None:
    offsets = offsets_of((2, 3))
    for bias in (torch.randn(3, N), torch.randn(2, N + 1), torch.randn(N), torch.randn(2, N).double()):
        with pytest.raises(ValueError, match=r"needs a bias \[2, 6\] of torch.float32"):
            ops.add_expert_bias(torch.randn(5, N), bias, offsets)


def formula(z: Tensor, alpha: float, limit: float) -> Tensor:
    gate, up = z.chunk(2, -1)
    gate, up = torch.clamp(gate, max=limit), torch.clamp(up, min=-limit, max=limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)


@pytest.mark.parametrize(("alpha", "limit"), [(1.702, 7.0), (1.0, 0.5)])
def test_the_clamped_activation_and_its_gradient_are_those_of_its_formula(alpha: float, limit: float) -> None:
    torch.manual_seed(0)
    edges = torch.tensor([limit, -limit, limit + 1e-9, -limit - 1e-9, 3 * limit, -3 * limit, 1e4, -1e4, 0.0])
    z = torch.cat([torch.cartesian_prod(edges, edges), 8 * torch.randn(200, 2)]).double()
    z = z.reshape(-1, 1, 2).expand(-1, 3, 2).transpose(1, 2).reshape(-1, 6).clone().requires_grad_()
    grad = torch.randn(z.shape[0], 3, dtype=torch.float64)
    found, want = ops.swiglu_clamped(z, alpha=alpha, limit=limit), formula(z, alpha, limit)
    torch.testing.assert_close(found, want, rtol=1e-14, atol=1e-14)
    have, expected = (torch.autograd.grad(y, z, grad)[0] for y in (found, want))
    torch.testing.assert_close(have, expected, rtol=1e-13, atol=1e-13)
    assert have[:, :3][z[:, :3] > limit].eq(0).all()
    assert have[:, 3:][z[:, 3:].abs() > limit].eq(0).all()
    assert have[:, 3:][z[:, 3:].abs() == limit].ne(0).any()


def test_rows_of_zeros_stay_zeros_and_an_odd_width_is_refused() -> None:
    assert not ops.swiglu_clamped(torch.zeros(2, 4), alpha=1.702, limit=7.0).any()
    with pytest.raises(ValueError, match="even last dimension"):
        ops.swiglu_clamped(torch.randn(2, 3), alpha=1.702, limit=7.0)
