"""`route` equals sixteen published routers and an independent reference bit for bit, and breaks ties by lowest id."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from moegraph import ops

from . import reference_router
from .published_routers import D_MODEL, EXPERTS, PUBLISHED, TOP_K, Published


@pytest.mark.parametrize("norm_topk_prob", [False, True])
@pytest.mark.parametrize("published", PUBLISHED, ids=lambda p: p.model_type)
def test_published_router_is_reproduced_bit_for_bit(published: Published, norm_topk_prob: bool) -> None:
    pytest.importorskip("transformers", minversion="5.24")
    torch.manual_seed(3)
    _, router = published.build()
    options: dict[str, Any] = {"top_k": TOP_K, **published.options}
    if hasattr(router, "norm_topk_prob"):
        router.norm_topk_prob = norm_topk_prob
        options |= {"norm_kind": "sum" if norm_topk_prob else "none", "norm_eps": published.norm_eps}
    bias = published.select_bias(router)
    x = torch.randn(256, D_MODEL)
    with torch.no_grad():
        hidden = x[None] if published.model_type == "afmoe" else x
        logits, weights, ids = router(hidden, *([bias] if published.bias == "argument" else []))
        gate = router.gate if hasattr(router, "gate") else router
        own_logits = ops.router_logits(x, gate.weight, getattr(gate, "bias", None))
        own_weights, own_ids = ops.route(own_logits, bias, **options)
    assert torch.equal(own_logits, logits)
    dense, own_dense = (
        torch.zeros(256, EXPERTS).scatter(1, i.long(), w) for w, i in ((weights, ids), (own_weights, own_ids))
    )
    assert torch.equal(ids.sort(-1).values, own_ids.long().sort(-1).values)
    assert float((dense - own_dense).abs().max()) == 0.0


def every_option() -> list[dict[str, Any]]:
    """Every combination of the vocabulary that has a meaning of its own."""
    scores = ("softmax", "sigmoid", "none")
    sources = ("score", "softmax_selected", "sigmoid_selected")
    groups = (None, (4, 2, "top2_sum", "-inf"), (4, 2, "max", "zero"), (2, 1, "max", "-inf"))
    norms = (("none", 0.0, "add"), ("sum", 1e-20, "add"), ("sum", 1e-3, "clamp"))
    return [
        {"score": s, "weight_from": w, "groups": g, "norm_kind": n[0], "norm_eps": n[1], "norm_mode": n[2]}
        for s, w, g, n in product(scores, sources, groups, norms)
    ]


@pytest.mark.parametrize("biased", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_option_equals_the_independent_reference(dtype: torch.dtype, biased: bool) -> None:
    torch.manual_seed(0)
    logits = torch.randn(32, 16, dtype=dtype)
    bias = torch.randn(16, dtype=dtype) if biased else None
    for options in every_option():
        weights, ids = ops.route(logits, bias, top_k=4, scale=2.5, **options)
        want_weights, want_ids = reference_router.route(logits, bias, top_k=4, scale=2.5, **options)
        assert torch.equal(ids, want_ids.to(torch.int32)), options
        assert torch.equal(weights, want_weights), options
        assert (weights.dtype, ids.dtype) == (dtype, torch.int32)


def test_ties_go_to_the_lowest_expert_id() -> None:
    assert ops.choose_experts(torch.ones(2, 300), 5).tolist() == [[0, 1, 2, 3, 4]] * 2
    assert ops.choose_experts(torch.tensor([[0.0, 2.0, 1.0, 2.0, 1.0]]), 4).tolist() == [[1, 3, 2, 4]]
    assert ops.choose_experts(torch.tensor([[-0.0, 0.0]]), 2).tolist() == [[0, 1]]
    _, ids = ops.route(torch.zeros(1, 8), top_k=2, groups=(4, 2, "max", "-inf"))
    assert ids.tolist() == [[0, 1]]


def test_a38_identical_tokens_choose_identically() -> None:
    logits = torch.zeros(64, 128)  # exact ties everywhere
    first = ops.route(logits, top_k=8)[1]
    assert torch.equal(first, torch.arange(8, dtype=torch.int32).expand(64, 8))
    assert torch.equal(first, ops.route(logits.clone(), top_k=8)[1])


def test_nan_logits_are_chosen_first_and_show_in_the_weights() -> None:
    logits = torch.tensor([[float("nan"), 1.0, float("nan"), 0.0]])
    weights, ids = ops.route(logits, top_k=2, score="sigmoid")
    assert ids.tolist() == [[0, 2]]
    assert weights.isnan().all()
    _, ids = ops.route(torch.full((3, 4), float("nan")), top_k=2, groups=(2, 1, "max", "-inf"))
    assert ids.min() >= 0
    assert ids.max() < 4


def test_a2_olmoe_weights_are_scores_over_all_experts_and_renormalising_changes_them() -> None:
    logits = torch.randn(16, 8)
    weights, _ = ops.route(logits, top_k=2)
    assert (weights.sum(-1) < 1).all()
    assert not torch.allclose(weights, ops.route(logits, top_k=2, norm_kind="sum")[0])


@pytest.mark.parametrize("how", ["max", "top2_sum"])
@pytest.mark.parametrize("score", ["sigmoid", "none"])
def test_a3_chosen_experts_stay_inside_the_kept_group(score: Any, how: Any) -> None:
    torch.manual_seed(0)
    bias = torch.tensor([-5.0, -5.0, -5.0, -5.0, -9.0, -9.0, -9.0, -9.0])  # every choice is negative
    _, ids = ops.route(torch.randn(64, 8), bias, score=score, top_k=3, groups=(2, 1, how, "-inf"))
    assert (ids < 4).all()


def test_a3_zero_fill_without_a_bias_stays_inside_even_when_kept_scores_vanish() -> None:
    logits = torch.full((1, 8), -200.0)
    logits[0, 6] = 0.0  # softmax: expert 6 has all the weight, everything else underflows to 0
    _, ids = ops.route(logits, top_k=2, groups=(4, 1, "max", "zero"))
    assert ids.tolist() == [[6, 7]]


def test_a4_selection_bias_moves_the_choice_and_not_the_weight() -> None:
    logits = torch.randn(32, 4)
    bias = torch.tensor([10.0, 0.0, 0.0, 0.0])
    weights, ids = ops.route(logits, bias, score="sigmoid", top_k=2)
    assert (ids[:, 0] == 0).all()
    assert torch.equal(weights[:, 0], logits[:, 0].sigmoid())


@pytest.mark.parametrize(("norm_kind", "eps"), [("none", 0.0), ("sum", 1e-20)])
def test_a5_small_sigmoids_under_a_large_bias_keep_their_value(norm_kind: Any, eps: float) -> None:
    logits = -17.0 + torch.randn(64, 8)
    bias = torch.full((8,), 12.0)
    options: dict[str, Any] = {"score": "sigmoid", "top_k": 2, "norm_kind": norm_kind, "norm_eps": eps}
    weights, ids = ops.route(logits, bias, **options)
    scores = torch.sigmoid(logits.double()).gather(1, ids.long())
    want = scores / scores.sum(-1, keepdim=True) if norm_kind == "sum" else scores
    torch.testing.assert_close(weights.double(), want, rtol=1e-6, atol=0.0)
    assert (weights > 0).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 5}, "top_k 5"),
        ({"top_k": 0}, "top_k 0"),
        ({"top_k": 3, "groups": (2, 1, "max", "-inf")}, "do not leave top_k 3"),
        ({"top_k": 1, "groups": (3, 1, "max", "-inf")}, "4 experts in 3 groups"),
        ({"top_k": 1, "score": "tanh"}, "'tanh'"),
        ({"top_k": 1, "weight_from": "logits"}, "'logits'"),
        ({"top_k": 1, "norm_kind": "l2"}, "'l2'"),
        ({"top_k": 1, "norm_kind": "sum", "norm_mode": "max"}, "'max'"),
    ],
)
def test_values_outside_the_vocabulary_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ops.route(torch.randn(2, 4), **options)
