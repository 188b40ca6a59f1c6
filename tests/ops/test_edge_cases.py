"""The shapes and routings that break mixture-of-experts code elsewhere, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moegraph import _torch_compat, ops
from moegraph.kernels.chips import Card

D, F = 6, 5


def experts(
    x: Tensor, logits: Tensor, w_up: Tensor, w_down: Tensor, top_k: int, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The layer's own chain from logits to output: (out [T, D], offsets [E])."""
    weights, ids = ops.route(logits, bias, top_k=top_k)
    order, inverse, offsets = ops.sort_by_expert(ids, logits.shape[1])
    rows = ops.permute(x, order, inverse, offsets, top_k=top_k)
    y = ops.grouped_mm(ops.swiglu(ops.grouped_mm(rows, w_up, offsets)), w_down, offsets)
    y = ops.scale_rows(y, ops.gather_weights(weights, order, inverse, offsets))
    return ops.combine(y, order, inverse, offsets, top_k=top_k), offsets


def every_expert(x: Tensor, logits: Tensor, w_up: Tensor, w_down: Tensor, top_k: int, bias: Tensor | None) -> Tensor:
    """The same without moving a row: all experts on all tokens, weighed by a dense [T, E] matrix."""
    scores = logits.softmax(-1)
    ids = torch.sort(scores if bias is None else scores + bias, descending=True, stable=True).indices[:, :top_k]
    dense = scores * torch.zeros_like(scores).scatter(1, ids, 1.0)
    gate, up = torch.einsum("td,efd->tef", x, w_up).chunk(2, -1)
    return torch.einsum("tef,edf,te->td", torch.nn.functional.silu(gate) * up, w_down, dense)


@pytest.mark.parametrize(
    ("tokens", "num_experts", "top_k", "forced"),
    [
        (7, 4, 2, None),
        (7, 4, 1, None),
        (5, 1, 1, None),
        (6, 3, 3, None),
        (6, 4, 1, 2),  # all tokens to one expert
        (6, 4, 2, 0),
        (0, 4, 2, None),
        (1, 8, 2, None),  # six experts without tokens
    ],
)
def test_layer_equals_every_expert_on_every_token(
    tokens: int, num_experts: int, top_k: int, forced: int | None
) -> None:
    torch.manual_seed(0)
    inputs = [
        torch.randn(*shape, dtype=torch.float64, requires_grad=True)
        for shape in ((tokens, D), (tokens, num_experts), (num_experts, 2 * F, D), (num_experts, D, F))
    ]
    bias = (
        None if forced is None else torch.zeros(num_experts, dtype=torch.float64).index_fill(0, torch.tensor(forced), 9)
    )
    out, offsets = experts(*inputs, top_k, bias)
    want = every_expert(*inputs, top_k, bias)
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12)
    assert int(offsets[-1]) == tokens * top_k

    grad = torch.randn_like(out)
    for have, expected in zip(
        torch.autograd.grad(out, inputs, grad), torch.autograd.grad(want, inputs, grad), strict=True
    ):
        torch.testing.assert_close(have, expected, rtol=1e-11, atol=1e-12)


def test_order_is_stable_and_inverse_undoes_it() -> None:
    ids = torch.tensor([[2, 0], [0, 2], [2, 0]], dtype=torch.int32)
    order, inverse, offsets = ops.sort_by_expert(ids, 4)
    assert order.tolist() == [1, 2, 5, 0, 3, 4]
    assert offsets.tolist() == [3, 3, 6, 6]
    assert inverse[order.long()].tolist() == list(range(6))
    assert {t.dtype for t in (order, inverse, offsets)} == {torch.int32}


def test_dropped_choices_lie_past_the_last_offset() -> None:
    ids = torch.tensor([[-1, 1], [3, 0], [0, 9]], dtype=torch.int32)
    order, _, offsets = ops.sort_by_expert(ids, 3)
    assert offsets.tolist() == [2, 3, 3]
    assert order.tolist() == [3, 4, 1, 0, 2, 5]


def tail() -> tuple[Tensor, Tensor, Tensor]:
    """Four of six slots used: rows 4 and 5 do not exist."""
    return ops.sort_by_expert(torch.tensor([[-1, 1], [2, 1], [1, -1]], dtype=torch.int32), 3)


def test_nan_past_the_last_offset_reaches_nothing() -> None:
    order, inverse, offsets = tail()
    rows = torch.randn(6, D)
    weight = torch.randn(3, F, D)
    grad = torch.randn(6, F)
    clean = (ops.grouped_mm_dgrad(grad, weight, offsets), ops.grouped_mm_wgrad(grad, rows, offsets))
    summed = ops.combine(rows, order, inverse, offsets, top_k=2)
    rows[4:], grad[4:] = float("nan"), float("nan")

    rows.requires_grad_()
    weight.requires_grad_()
    out = ops.grouped_mm(rows, weight, offsets)
    assert out[4:].eq(0).all()
    for have, want in zip(torch.autograd.grad(out, (rows, weight), grad), clean, strict=True):
        assert torch.equal(have, want)
    assert clean[0][4:].eq(0).all()
    assert torch.equal(ops.combine(rows, order, inverse, offsets, top_k=2), summed)


def test_rows_past_the_last_offset_are_zero_wherever_rows_are_made() -> None:
    order, inverse, offsets = tail()
    x, weights = torch.randn(3, D, requires_grad=True), torch.randn(3, 2, requires_grad=True)
    rows = ops.permute(x, order, inverse, offsets, top_k=2)
    row_weight = ops.gather_weights(weights, order, inverse, offsets)
    assert rows[4:].eq(0).all()
    assert row_weight[4:].eq(0).all()
    # A gradient of NaN for rows that do not exist changes no token and no weight.
    poison = torch.ones_like(rows).index_fill(0, torch.tensor([4, 5]), float("nan"))
    dx, dw = torch.autograd.grad((rows, row_weight), (x, weights), (poison, poison[:, 0]))
    assert dx.sum(1).tolist() == [1.0 * D, 2.0 * D, 1.0 * D]
    assert dw.tolist() == [[0, 1], [1, 1], [1, 0]]


def test_a31_experts_without_tokens_have_a_weight_gradient_of_exactly_zero() -> None:
    offsets = torch.tensor([0, 0, 4, 4, 4, 4, 6, 6], dtype=torch.int32)
    rows, grad = torch.randn(6, 16), torch.randn(6, 8)
    for _ in range(8):
        torch.full((8, 8, 16), float("nan"))  # freed at once: the allocator hands its memory out again
        wgrad = ops.grouped_mm_wgrad(grad, rows, offsets)
        assert wgrad.isfinite().all()
        assert wgrad[[0, 1, 3, 4, 5, 7]].eq(0).all()
        assert wgrad[[2, 6]].ne(0).any()


def test_expanded_gradients_are_accepted() -> None:
    offsets = torch.tensor([2, 4], dtype=torch.int32)
    rows, weight = torch.randn(4, 3, requires_grad=True), torch.randn(2, 5, 3, requires_grad=True)
    dense = torch.autograd.grad(ops.grouped_mm(rows, weight, offsets), (rows, weight), torch.ones(4, 5))
    expanded = torch.autograd.grad(ops.grouped_mm(rows, weight, offsets).sum(), (rows, weight))
    assert all(torch.equal(a, b) for a, b in zip(dense, expanded, strict=True))


def test_combine_adds_in_slot_order_in_float32() -> None:
    # 1 + 2^-9 rounds to 1 in bfloat16, four times 2^-9 do not: summed in bfloat16 the result would stay 1.
    y = torch.tensor([[1.0], [2**-9], [2**-9], [2**-9], [2**-9]], dtype=torch.bfloat16)
    order, inverse, offsets = ops.sort_by_expert(torch.zeros(1, 5, dtype=torch.int32), 1)
    assert ops.combine(y, order, inverse, offsets, top_k=5).item() == 1.0 + 2**-7


@pytest.mark.parametrize(
    ("where", "dtype", "n", "k", "backend"),
    [
        (torch.device("cpu"), torch.bfloat16, 64, 64, "loop"),
        (Card("a Hopper", 90), torch.bfloat16, 64, 64, "triton"),
        (Card("a Hopper", 90), torch.float32, 64, 64, "triton"),
        (Card("a Hopper", 90), torch.float64, 64, 64, "loop"),
        (Card("a Hopper", 90), torch.bfloat16, 60, 64, "loop"),
        # A chip that was not measured keeps torch's grouped kernel.
        (Card("a Blackwell", 103), torch.bfloat16, 64, 64, "_grouped_mm"),
        (Card("an Ampere", 80), torch.bfloat16, 64, 64, "loop"),
    ],
)
def test_backend_of_grouped_mm_states_its_reason(
    where: torch.device | Card, dtype: torch.dtype, n: int, k: int, backend: str
) -> None:
    chosen, reason = ops.grouped_mm_backend("grouped_mm", dtype, n, k, 512, 8, where)
    assert chosen == backend
    assert reason
    assert ("waits for the device" in reason) == (isinstance(where, Card) and backend == "loop")


def test_grouped_kernel_of_cuda_is_called_by_its_schema() -> None:
    rows, grad = (torch.empty(32, w, dtype=torch.bfloat16, device="meta") for w in (64, 96))
    weight = torch.empty(4, 96, 64, dtype=torch.bfloat16, device="meta")
    offsets = torch.empty(4, dtype=torch.int32, device="meta")
    assert _torch_compat.grouped_mm(rows, weight.transpose(1, 2), offsets).shape == (32, 96)
    assert _torch_compat.grouped_mm(grad, weight, offsets).shape == (32, 64)
    wgrad = _torch_compat.grouped_mm(grad.t(), rows, offsets)
    assert (wgrad.shape, wgrad.is_contiguous()) == ((4, 96, 64), True)


def test_embedding_gradient_adds_repeated_ids_and_is_reproducible() -> None:
    ids = torch.randint(0, 3, (1000,))
    grad = torch.randn(1000, 8)
    first = ops.embedding_wgrad(grad, ids, 5)
    torch.testing.assert_close(first, torch.zeros(5, 8).index_add(0, ids, grad), rtol=1e-5, atol=1e-4)
    assert first[3:].eq(0).all()
    assert all(torch.equal(first, ops.embedding_wgrad(grad, ids, 5)) for _ in range(3))


@pytest.mark.parametrize("bad", [7, -1])
def test_out_of_range_ids_and_labels_raise(bad: int) -> None:
    with pytest.raises(IndexError):
        ops.embedding(torch.tensor([0, bad]), torch.randn(7, 2))
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        ops.cross_entropy(torch.randn(2, 7), torch.tensor([0, bad]))


def test_wrong_shapes_are_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match="even last dimension"):
        ops.swiglu(torch.randn(2, 3))
    with pytest.raises(ValueError, match="even rotary_dim"):
        ops.rope(torch.randn(1, 2, 1, 4), torch.zeros(1, 2), theta=10.0, rotary_dim=3)
    with pytest.raises(ValueError, match="window 0"):
        ops.attention(*[torch.randn(1, 2, 1, 4)] * 3, window=0, scale=1.0)
    with pytest.raises(ValueError, match="3 query heads"):
        ops.attention(torch.randn(1, 2, 3, 4), *[torch.randn(1, 2, 2, 4)] * 2, scale=1.0)


@pytest.mark.parametrize(
    "changed", [{"b_up": (1, 8)}, {"b_up": (2, 4)}, {"b_down": (2, 8)}, {"clamp": (1.7, 0.0)}, {"clamp": (1.7, -1.0)}]
)
def test_experts_refuse_biases_and_clamps_that_do_not_fit(changed: dict[str, tuple[float, ...]]) -> None:
    metadata = ops.sort_by_expert(torch.tensor([[0], [1], [1]], dtype=torch.int32), 2)
    options = {name: torch.zeros([int(n) for n in v]) if name != "clamp" else v for name, v in changed.items()}
    with pytest.raises(ValueError, match="expert_ffn"):
        ops.expert_ffn(
            torch.randn(3, 4), *metadata, torch.rand(3), torch.randn(2, 8, 4), torch.randn(2, 4, 4), top_k=1, **options
        )
