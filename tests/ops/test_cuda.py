"""On a GPU: every fused backend against the float64 reference, without a host synchronisation, and reproducible."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from moegraph import ops
from moegraph.ops import attention_reference

from .op_cases import CASES, Case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@contextmanager
def no_host_sync() -> Iterator[None]:
    """Raises where the host waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def relative_error(have: Tensor, want: Tensor) -> float:
    return float((have.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30))


# --- attention ---------------------------------------------------------------------------------------------------


def qkv(sequences: int, length: int, heads: int, kv_heads: int, width: int) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(sequences, length, h, width) for h in (heads, kv_heads, kv_heads, heads)]
    return [torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in shapes]


def documents(sequences: int, length: int) -> Tensor:
    """Documents of 3 tokens, of 100, and one of padding at the end of the last row."""
    ids = (torch.arange(length) // 100).repeat(sequences, 1)
    ids[0, : length // 2] = 1000 + torch.arange(length // 2) // 3
    ids[-1, length - length // 5 :] = -1
    return ids.to("cuda", torch.int32)


ATTENTION = [
    pytest.param((2, 512, 8, 8, 128), False, None, "cudnn", id="plain"),
    pytest.param((2, 512, 8, 2, 128), False, None, "cudnn", id="grouped queries"),
    pytest.param((2, 384, 4, 4, 64), False, None, "cudnn", id="width 64"),
    pytest.param((2, 512, 8, 2, 128), True, None, "cudnn_bias", id="documents"),
    pytest.param((3, 320, 4, 4, 64), True, 33, "cudnn_bias", id="documents and window"),
    pytest.param((2, 512, 8, 2, 128), False, 100, "flash", id="window"),
    pytest.param((1, 256, 4, 2, 256), False, None, "flash", id="width 256"),
    pytest.param((2, 128, 4, 2, 100), True, 33, "reference", id="width 100"),
]


@pytest.mark.parametrize(("shape", "masked", "window", "backend"), ATTENTION)
def test_attention_equals_the_float64_reference(
    shape: tuple[int, ...], masked: bool, window: int | None, backend: str
) -> None:
    q, k, v, grad = qkv(*shape)
    ids = documents(shape[0], shape[1]) if masked else None
    assert ops.attention_backend("cuda", q.dtype, shape[-1], documents=masked, window=window)[0] == backend
    scale = shape[-1] ** -0.5
    for x in (q, k, v):
        x.requires_grad_()
    out, lse = ops.attention(q, k, v, ids, window=window, scale=scale)
    grads = torch.autograd.grad(out, (q, k, v), grad)

    exact = [x.detach().double() for x in (q, k, v)]
    want, want_lse = attention_reference.attention_forward(*exact, ids, window, scale)
    want_grads = attention_reference.attention_backward(grad.double(), *exact, want, want_lse, ids, window, scale)
    assert relative_error(out, want) < 5e-3
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-3, atol=2e-3)
    for have, expected in zip(grads, want_grads, strict=True):
        assert have.is_contiguous()
        assert relative_error(have, expected) < 1e-2
    if ids is not None:
        padding = ids < 0
        assert all(x[padding].eq(0).all() for x in (out, *grads))


@pytest.mark.parametrize(("shape", "masked", "window", "backend"), ATTENTION)
def test_attention_never_waits_for_the_device(
    shape: tuple[int, ...], masked: bool, window: int | None, backend: str
) -> None:
    q, k, v, grad = qkv(*shape)
    ids = documents(shape[0], shape[1]) if masked else None

    def run() -> None:
        out, lse = ops.attention(q, k, v, ids, window=window, scale=0.1)
        ops.attention_backward(grad, q, k, v, out, lse, ids, window, 0.1)

    run()  # plans and workspaces are made here
    with no_host_sync():
        run()


# --- grouped products --------------------------------------------------------------------------------------------


def groups(counts: list[int], tail: int, n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(rows, weight, grad, offsets); rows and gradients past the last offset are NaN."""
    torch.manual_seed(0)
    total = sum(counts)
    rows, grad = torch.randn(total + tail, k), torch.randn(total + tail, n)
    rows[total:] = grad[total:] = float("nan")
    weight = torch.randn(len(counts), n, k) / k**0.5
    offsets = torch.tensor(counts).cumsum(0).to("cuda", torch.int32)
    return rows.to("cuda", dtype), weight.to("cuda", dtype), grad.to("cuda", dtype), offsets


GROUPS = [
    pytest.param([128, 0, 7, 250, 0, 31], 0, id="uneven"),
    pytest.param([0, 0, 300, 0], 20, id="one expert, with a tail"),
    pytest.param([0, 0, 0], 16, id="no rows at all"),
    pytest.param([64], 0, id="one"),
]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 5e-3), (torch.float32, 1e-5)])
@pytest.mark.parametrize(("counts", "tail"), GROUPS)
def test_grouped_products_equal_float64(counts: list[int], tail: int, dtype: torch.dtype, tolerance: float) -> None:
    n, k = 96, 64
    rows, weight, grad, offsets = groups(counts, tail, n, k, dtype)
    results = (
        ops.grouped_mm(rows, weight, offsets),
        ops.grouped_mm_dgrad(grad, weight, offsets),
        ops.grouped_mm_wgrad(grad, rows, offsets),
    )
    r, w, g, o = rows.cpu().double(), weight.cpu().double(), grad.cpu().double(), offsets.cpu()
    wanted = (ops.grouped_mm(r, w, o), ops.grouped_mm_dgrad(g, w, o), ops.grouped_mm_wgrad(g, r, o))
    for have, want in zip(results, wanted, strict=True):
        assert have.isfinite().all()
        assert relative_error(have.cpu(), want) < tolerance
    assert results[0][sum(counts) :].eq(0).all()
    assert results[1][sum(counts) :].eq(0).all()
    assert results[2][torch.tensor(counts) == 0].eq(0).all()


def test_grouped_products_never_wait_for_the_device_in_bfloat16() -> None:
    rows, weight, grad, offsets = groups([128, 0, 7, 250], 15, 96, 64, torch.bfloat16)

    def run() -> None:
        ops.grouped_mm(rows, weight, offsets)
        ops.grouped_mm_dgrad(grad, weight, offsets)
        ops.grouped_mm_wgrad(grad, rows, offsets)

    run()
    with no_host_sync():
        run()


def test_a31_dirty_memory_does_not_reach_an_empty_experts_weight_gradient() -> None:
    rows, _, grad, offsets = groups([0, 0, 40, 0, 0, 24, 0, 0], 0, 64, 64, torch.bfloat16)
    for _ in range(4):
        torch.full((8, 64, 64), float("nan"), device="cuda", dtype=torch.bfloat16)
        wgrad = ops.grouped_mm_wgrad(grad, rows, offsets)
        assert wgrad[[0, 1, 3, 4, 6, 7]].eq(0).all()
        assert wgrad.isfinite().all()


# --- everything else ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_operator_on_cuda_equals_cpu_in_float64(case: Case) -> None:
    def run(move: Callable[[Tensor], Tensor]) -> list[Tensor]:
        leaves = [move(t).requires_grad_(t.is_floating_point()) for t in case.inputs(torch.float64)]
        if not case.differentiable:
            return list(case.results(*leaves))
        outputs = case.differentiated(*leaves)
        trained = [t for t in leaves if t.requires_grad]
        grads = torch.autograd.grad(outputs, trained, [torch.ones_like(o) for o in outputs], allow_unused=True)
        return [*outputs, *(g for g in grads if g is not None)]

    for have, want in zip(run(lambda t: t.cuda()), run(lambda t: t), strict=True):
        torch.testing.assert_close(have.cpu(), want, rtol=1e-10, atol=1e-12)


def layer(x: Tensor, gate: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
    """A whole mixture-of-experts layer, as the lowering spells it."""
    weights, ids = ops.route(ops.router_logits(x, gate), top_k=2, norm_kind="sum")
    order, inverse, offsets = ops.sort_by_expert(ids, gate.shape[0])
    rows = ops.permute(x, order, inverse, offsets, top_k=2)
    y = ops.grouped_mm(ops.swiglu(ops.grouped_mm(rows, w_up, offsets)), w_down, offsets)
    y = ops.scale_rows(y, ops.gather_weights(weights, order, inverse, offsets))
    return ops.combine(y, order, inverse, offsets, top_k=2)


def test_a_layer_in_bfloat16_never_waits_for_the_device_and_is_reproducible() -> None:
    torch.manual_seed(0)
    shapes: list[tuple[int, ...]] = [(256, 64), (8, 64), (8, 2 * 32, 64), (8, 64, 32)]
    made = [torch.randn(s, device="cuda", dtype=torch.bfloat16).requires_grad_() for s in shapes]
    grad = torch.randn(256, 64, device="cuda", dtype=torch.bfloat16)

    def run() -> tuple[Any, ...]:
        out = layer(*made)
        return (out, *torch.autograd.grad(out, made, grad))

    first = run()
    with no_host_sync():
        second = run()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_embedding_gradient_is_reproducible() -> None:
    ids = torch.randint(0, 50, (20000,), device="cuda")
    grad = torch.randn(20000, 64, device="cuda", dtype=torch.bfloat16)
    first = ops.embedding_wgrad(grad, ids, 100)
    with no_host_sync():
        ops.embedding_wgrad(grad, ids, 100)
    assert all(torch.equal(first, ops.embedding_wgrad(grad, ids, 100)) for _ in range(5))
    want = torch.zeros(100, 64, device="cuda", dtype=torch.float64).index_add(0, ids, grad.double())
    assert relative_error(first, want) < 4e-3


def test_cross_entropy_of_bfloat16_logits_never_waits_for_the_device() -> None:
    logits = torch.randn(512, 5000, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(0, 5000, (512,), device="cuda")
    labels[::5] = -100

    def run() -> tuple[Tensor, Tensor]:
        loss, _ = ops.cross_entropy(logits, labels)
        return loss, torch.autograd.grad(loss.sum(), logits)[0]

    run()
    with no_host_sync():
        loss, grad = run()
    exact = logits.detach().double().requires_grad_()
    want = torch.nn.functional.cross_entropy(exact, labels, reduction="none")
    torch.testing.assert_close(loss.double(), want.detach(), rtol=1e-5, atol=1e-5)
    assert relative_error(grad, torch.autograd.grad(want.sum(), exact)[0]) < 4e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("keep", [0, 1])
def test_weight_gradients_of_linear_layers_and_embeddings_are_added_unrounded_and_nothing_waits(
    dtype: torch.dtype, keep: int
) -> None:
    torch.manual_seed(0)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    grad, rows = (torch.randn(1500, width, device="cuda").to(dtype) for width in (264, 136))
    ids = torch.randint(0, 50, (1500,), device="cuda")
    flag = torch.tensor([keep], dtype=torch.int32)
    start, table = torch.randn(264, 136, device="cuda", dtype=wide), torch.randn(70, 264, device="cuda", dtype=wide)
    into, summed, again = start.clone(), table.clone(), table.clone()
    ops.embedding_wgrad_add(again, flag, grad, ids, 70)  # compiles it
    with no_host_sync():
        ops.linear_wgrad_add(into, flag, grad, rows)
        ops.embedding_wgrad_add(summed, flag, grad, ids, 70)
    bound = {torch.bfloat16: 1e-5, torch.float32: 1e-5, torch.float64: 1e-14}[dtype]
    assert relative_error(into, keep * start.double() + grad.double().t() @ rows.double()) < bound
    want = torch.zeros(70, 264, device="cuda", dtype=torch.float64).index_add_(0, ids, grad.double())
    assert relative_error(summed, keep * table.double() + want) < bound
    assert torch.equal(summed, again)
    assert torch.equal(summed[50:], keep * table[50:])
