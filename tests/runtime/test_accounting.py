"""Parameters and operations equal published figures and counts by hand."""

from __future__ import annotations

from typing import Any

import pytest

from moegraph.lowering import lower
from moegraph.runtime.accounting import count_parameters, flops_per_token
from moegraph.specs.schema import Spec


def _spec(model: dict[str, Any], seq_len: int, sequences: int = 1) -> Spec:
    data = {"source": "corpus:python-stdlib", "seq_len": seq_len}
    train = {"steps": 1, "tokens_per_step": sequences * seq_len}
    return Spec.model_validate({"spec_version": 1, "model": model, "train": train, "data": data})


def _olmo3_47b(experts: int) -> Spec:
    """The 47-billion-parameter model of OLMo-core 3's report, with another number of experts."""
    attention = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "qk_norm": "per_head", "rope": {"theta": 5e5}}
    return _spec(
        {
            "vocab_size": 100352,
            "d_model": 4096,
            "num_layers": 8,
            "attention": attention,
            "norm": {"placement": "post"},
            "dense": {"d_ff": 20480, "layers": [0]},
            "moe": {"num_experts": experts, "top_k": 4, "d_ff": 4096, "shared": {"d_ff": 4096}},
        },
        seq_len=8192,
        sequences=2,
    )


@pytest.mark.parametrize(
    ("experts", "total"), [(8, "4.580"), (32, "13.037"), (48, "18.674"), (64, "24.312"), (128, "46.863")]
)
def test_parameters_of_the_47b_model_are_those_published(experts: int, total: str) -> None:
    program = lower(_olmo3_47b(experts))
    assert f"{count_parameters(program)[0] / 1e9:.3f}" == total


@pytest.mark.parametrize(("experts", "active"), [(8, "3.171"), (128, "3.175")])
def test_active_parameters_of_the_47b_model_are_those_published(experts: int, active: str) -> None:
    program = lower(_olmo3_47b(experts))
    assert f"{count_parameters(program)[1] / 1e9:.3f}" == active


def test_operations_of_the_47b_model_are_those_published() -> None:
    """18.18 GFLOP per token (within what the router's width moves), and 946 TFLOP/s at 52,000 tokens/s for E = 128."""
    found = {experts: flops_per_token(spec := _olmo3_47b(experts), lower(spec)) / 1e9 for experts in (8, 48, 128)}
    assert f"{found[48]:.2f}" == "18.18"
    assert all(value == pytest.approx(18.18, rel=1e-3) for value in found.values())
    assert round(found[128] * 52_000 / 1e3) == 946


SMALL = {
    "vocab_size": 50,
    "d_model": 16,
    "num_layers": 3,
    "attention": {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8},
    "dense": {"d_ff": 24, "layers": [0]},
    "moe": {"num_experts": 8, "top_k": 2, "d_ff": 12, "shared": {"num_experts": 2, "d_ff": 10, "gate": "sigmoid"}},
}


def _by_hand(experts: int) -> int:
    """Forward operations per token of SMALL at 10 tokens per sequence, times three."""
    attention = 2 * 16 * (32 + 16 + 16) + 2 * 32 * 16 + 2 * 2 * 32 * 11 / 2  # q, k, v; output; a mean of 5.5 keys
    dense = 3 * 2 * 16 * 24
    routed = 2 * 3 * 2 * 16 * 12
    shared = 3 * 2 * 16 * 20 + 2 * 16
    head = 2 * 16 * 50
    return int(3 * (3 * attention + dense + 2 * (routed + shared + 2 * 16 * experts) + head))


def test_a43_operations_equal_a_count_by_hand() -> None:
    spec = _spec(SMALL, seq_len=10)
    assert flops_per_token(spec, lower(spec)) == _by_hand(8)


def test_a43_more_experts_cost_only_their_router() -> None:
    counts = {}
    for experts in (8, 64):
        spec = _spec({**SMALL, "moe": {**SMALL["moe"], "num_experts": experts}}, seq_len=10)  # type: ignore[dict-item]
        counts[experts] = flops_per_token(spec, lower(spec))
    assert counts[64] - counts[8] == 3 * 2 * 2 * 16 * 56
    assert counts[64] == _by_hand(64)


def test_operations_per_token_do_not_depend_on_the_batch() -> None:
    one, four = _spec(SMALL, 10), _spec(SMALL, 10, sequences=4)
    assert flops_per_token(one, lower(one)) == flops_per_token(four, lower(four))


def test_a_window_bounds_the_keys() -> None:
    def cost(window: dict[str, Any] | None) -> float:
        spec = _spec({**SMALL, "attention": {**SMALL["attention"], "window": window}}, 10)  # type: ignore[dict-item]
        return flops_per_token(spec, lower(spec))

    per_pair = 3 * 2 * 2 * 32 / 10
    assert cost({"size": 10}) == cost(None)
    # 4 keys at most: 1 + 2 + 3 + 7 · 4 = 34 of 55 pairs, in all three layers or in one of them.
    assert cost(None) - cost({"size": 4}) == pytest.approx(3 * per_pair * (55 - 34))
    assert cost(None) - cost({"size": 4, "pattern": "GLG"}) == pytest.approx(per_pair * (55 - 34))


def test_a_tied_embedding_counts_once_and_costs_the_same() -> None:
    untied, tied = _spec(SMALL, 10), _spec({**SMALL, "tie_embeddings": True}, 10)
    assert count_parameters(lower(untied))[0] - count_parameters(lower(tied))[0] == 50 * 16
    assert flops_per_token(untied, lower(untied)) == flops_per_token(tied, lower(tied))


def test_the_selection_bias_is_no_parameter() -> None:
    free = {**SMALL, "moe": {**SMALL["moe"], "router": {"select_bias": "learned_free"}}}  # type: ignore[dict-item]
    assert count_parameters(lower(_spec(free, 10))) == count_parameters(lower(_spec(SMALL, 10)))
