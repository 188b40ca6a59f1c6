"""Attention equals the dense textbook formula under every mask, for grouped queries, in blocks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moegraph import ops
from moegraph.ops import attention_cuda, attention_reference


def dense(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, window: int | None, scale: float) -> Tensor:
    """All S × S scores at once, keys and values repeated per query head."""
    repeats, length = q.shape[2] // k.shape[2], q.shape[1]
    k, v = k.repeat_interleave(repeats, 2), v.repeat_interleave(repeats, 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    position = torch.arange(length)
    sees = (position[:, None] >= position)[None]
    if window is not None:
        sees = sees & (position > position[:, None] - window)
    if documents is not None:
        sees = sees & (documents[:, :, None] == documents[:, None]) & (documents >= 0)[:, :, None]
    p = torch.where(sees[:, None], scores, -torch.inf).softmax(-1).nan_to_num(0.0)
    return torch.einsum("bhqk,bkhd->bqhd", p, v)


def documents(sequences: int, length: int) -> Tensor:
    """Rows with documents of uneven length; the last row ends in padding."""
    ids = (torch.arange(length) // 37).repeat(sequences, 1).to(torch.int32)
    ids[0] = torch.arange(length) // 3
    ids[-1, length - length // 4 :] = -1
    return ids


@pytest.mark.parametrize("window", [None, 1, 5, 1000])
@pytest.mark.parametrize("masked", [False, True], ids=["one document", "documents"])
@pytest.mark.parametrize("length", [1, 63, 150])
def test_output_and_gradients_equal_the_dense_formula(length: int, masked: bool, window: int | None) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, length, h, 8, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2))
    ids = documents(3, length) if masked else None
    out, lse = ops.attention(q, k, v, ids, window=window, scale=0.3)
    want = dense(q, k, v, ids, window, 0.3)
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12)
    assert lse.isfinite().all()
    grad = torch.randn_like(out)
    for have, expected in zip(
        torch.autograd.grad(out, (q, k, v), grad), torch.autograd.grad(want, (q, k, v), grad), strict=True
    ):
        torch.testing.assert_close(have, expected, rtol=1e-11, atol=1e-12)


def test_small_blocks_change_nothing_but_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(2, 40, 4, 8, dtype=torch.float64, requires_grad=True)
    whole = ops.attention(q, q, q, documents(2, 40), window=7, scale=0.3)
    monkeypatch.setattr(attention_reference, "MAX_SCORES", 1)  # one query at a time
    single = ops.attention(q, q, q, documents(2, 40), window=7, scale=0.3)
    for a, b in zip(whole, single, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)
    grads = [torch.autograd.grad(out.square().sum(), q)[0] for out in (whole[0], single[0])]
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)


def test_padding_gets_zeros_and_gives_no_gradient() -> None:
    q, k, v = (torch.randn(1, 6, 2, 4, requires_grad=True) for _ in range(3))
    ids = torch.tensor([[0, 0, 0, 0, -1, -1]], dtype=torch.int32)
    out, lse = ops.attention(q, k, v, ids, scale=1.0)
    assert out[0, 4:].eq(0).all()
    assert lse[..., 4:].eq(0).all()
    for grad in torch.autograd.grad(out, (q, k, v), torch.ones_like(out)):
        assert grad[0, 4:].eq(0).all()
        assert grad.isfinite().all()


def test_a48_a_document_is_as_if_it_were_alone() -> None:
    torch.manual_seed(1)
    q, k, v = (torch.randn(1, 12, 2, 4, dtype=torch.float64) for _ in range(3))
    ids = torch.tensor([[0] * 5 + [1] * 7], dtype=torch.int32)
    packed, lse = ops.attention(q, k, v, ids, scale=0.5)
    for part in (slice(0, 5), slice(5, 12)):
        alone, alone_lse = ops.attention(q[:, part], k[:, part], v[:, part], scale=0.5)
        torch.testing.assert_close(packed[:, part], alone, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(lse[..., part], alone_lse, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("shape", [(0, 4, 2, 8), (2, 0, 2, 8)])
def test_no_sequences_and_no_tokens(shape: tuple[int, ...]) -> None:
    q = torch.randn(shape, requires_grad=True)
    out, lse = ops.attention(q, q, q, window=2, scale=1.0)
    assert (out.shape, lse.shape) == (shape, (shape[0], shape[2], shape[1]))
    assert torch.autograd.grad(out.sum(), q)[0].shape == shape


def test_logsumexp_is_that_of_the_visible_scores() -> None:
    q, k = torch.randn(1, 5, 1, 4, dtype=torch.float64), torch.randn(1, 5, 1, 4, dtype=torch.float64)
    _, lse = ops.attention(q, k, k, window=2, scale=0.5)
    scores = q[0, :, 0] @ k[0, :, 0].T * 0.5
    for i in range(5):
        torch.testing.assert_close(lse[0, 0, i], scores[i, max(0, i - 1) : i + 1].logsumexp(0))


def test_large_scores_do_not_overflow() -> None:
    q = torch.full((1, 3, 1, 4), 100.0, requires_grad=True)
    out, lse = ops.attention(q, q, q, scale=10.0)
    assert out.isfinite().all()
    assert lse.isfinite().all()
    assert torch.autograd.grad(out.sum(), q)[0].isfinite().all()


@pytest.mark.parametrize(
    ("dtype", "head_dim", "masked", "window", "backend"),
    [
        (torch.bfloat16, 128, False, None, "cudnn"),
        (torch.bfloat16, 128, True, None, "cudnn_bias"),
        (torch.bfloat16, 64, True, 512, "cudnn_bias"),
        (torch.bfloat16, 128, False, 512, "flash"),
        (torch.bfloat16, 256, False, None, "flash"),
        (torch.bfloat16, 256, True, None, "reference"),
        (torch.bfloat16, 100, False, None, "reference"),
        (torch.float32, 128, False, None, "reference"),
        (torch.float64, 64, True, None, "reference"),
    ],
)
def test_backend_on_cuda_is_read_from_the_table(
    dtype: torch.dtype, head_dim: int, masked: bool, window: int | None, backend: str
) -> None:
    chosen, reason = ops.attention_backend("cuda", dtype, head_dim, documents=masked, window=window)
    assert (chosen, bool(reason)) == (backend, True)
    assert ops.attention_backend("cpu", dtype, head_dim, documents=masked, window=window)[0] == "reference"


@pytest.mark.parametrize("window", [None, 5])
def test_mask_bias_of_cuda_hides_what_the_reference_hides(window: int | None) -> None:
    ids = documents(2, 40)
    bias = attention_cuda.mask_bias(ids, window, torch.float32)
    q = torch.randn(2, 40, 1, 4)
    (block,) = attention_reference.query_blocks(q, ids, window, torch.float32)
    padding = (ids < 0)[:, None, :, None]
    assert torch.equal(bias.eq(0) & ~padding, block.bias.eq(0))
    assert bias.diagonal(dim1=-2, dim2=-1).eq(0).all()  # every query sees itself, padding included


@pytest.mark.parametrize("backend", ["cudnn", "cudnn_bias", "flash"])
def test_fused_kernels_are_called_by_their_schema(backend: str) -> None:
    q, k, grad = (torch.empty(2, 64, h, 64, dtype=torch.bfloat16, device="meta") for h in (4, 2, 4))
    ids = torch.empty(2, 64, dtype=torch.int32, device="meta") if backend == "cudnn_bias" else None
    out, lse = attention_cuda.attention_forward(backend, q, k, k, ids, None, 0.1)
    assert (out.shape, out.is_contiguous()) == (q.shape, True)
    assert (lse.shape, lse.dtype, lse.is_contiguous()) == ((2, 4, 64), torch.float32, True)
    grads = attention_cuda.attention_backward(backend, grad, q, k, k, out, lse, ids, None, 0.1)
    assert [g.shape for g in grads] == [q.shape, k.shape, k.shape]
    assert all(g.is_contiguous() for g in grads)
