"""The shipped presets load, and have the sizes that they say."""

from __future__ import annotations

import pytest

from moegraph.specs import Spec, load_spec
from moegraph.specs.sources import preset_names


def parameters(spec: Spec) -> tuple[int, int]:
    """Total and active parameters, counted by hand: both embeddings count, and of the experts those a token visits."""
    model, attention = spec.model, spec.model.attention
    width, heads, kv_heads, head = model.d_model, attention.num_heads, model.num_kv_heads, model.head_dim
    per_layer = 2 * width * heads * head + 2 * width * kv_heads * head
    per_layer += 2 * head if attention.qk_norm == "per_head" else 0
    per_layer += width * (4 if model.norm.placement == "both" else 2)
    total = active = (
        model.num_layers * per_layer + width + model.vocab_size * width * (1 if model.tie_embeddings else 2)
    )
    for layer in range(model.num_layers):
        if model.is_dense(layer):
            assert model.dense is not None
            total, active = (each + 3 * width * model.dense.d_ff for each in (total, active))
            continue
        assert model.moe is not None
        expert = 3 * width * model.moe.d_ff
        shared = model.moe.shared
        always = width * model.moe.num_experts
        always += 3 * width * shared.num_experts * (shared.d_ff or model.moe.d_ff) if shared is not None else 0
        total += always + expert * model.moe.num_experts
        active += always + expert * model.moe.top_k
    return total, active


@pytest.mark.parametrize("name", preset_names())
def test_a_shipped_preset_loads(name: str) -> None:
    load_spec(name)


def test_the_four_presets_are_shipped() -> None:
    assert {
        "presets/tiny.yaml",
        "presets/tiny-dense.yaml",
        "presets/olmo3-47b.yaml",
        "presets/olmo3-ultra-2t.yaml",
    } <= set(preset_names())


@pytest.mark.parametrize(
    ("experts", "billions", "active"),
    [
        (8, "4.580", "3.171"),
        (32, "13.037", "3.172"),
        (48, "18.674", "3.172"),
        (64, "24.312", "3.173"),
        (128, "46.863", "3.175"),
    ],
)
def test_the_47b_model_has_the_published_sizes(experts: int, billions: str, active: str) -> None:
    spec = load_spec("presets/olmo3-47b.yaml", [f"model.moe.num_experts={experts}"])
    total, visited = parameters(spec)
    assert f"{total / 1e9:.3f}" == billions
    assert f"{visited / 1e9:.3f}" == active


def test_the_47b_model_is_the_published_one() -> None:
    spec = load_spec("presets/olmo3-47b.yaml")
    assert spec.sequences_per_microbatch == 2
    assert (spec.layout.world, spec.layout.ep) == (8, 8)
    assert spec.model.dense is not None
    assert (spec.model.dense.d_ff, spec.model.dense.layers) == (20480, (0,))


def test_the_ultra_model_has_2_38_trillion_parameters() -> None:
    spec = load_spec("presets/olmo3-ultra-2t.yaml")
    total, active = parameters(spec)
    assert f"{total / 1e12:.2f}" == "2.38"
    assert f"{active / 1e9:.1f}" == "58.4"
    assert spec.layout.world == 512
    assert (spec.layout.ep, spec.layout.pp, spec.model.num_layers) == (32, 8, 63)


def test_tiny_and_tiny_dense_use_equally_many_parameters_per_token() -> None:
    tiny, dense = load_spec("presets/tiny.yaml"), load_spec("presets/tiny-dense.yaml")
    (_, active), (total, dense_active) = parameters(tiny), parameters(dense)
    assert total == dense_active
    assert active - dense_active == 3 * 8 * 128  # the routers of three layers
    assert (active, dense_active) == (1_839_488, 1_836_416)  # as the preset's comment says
    assert dense.model.moe is None
    assert tiny.train.optimizer == dense.train.optimizer
    assert tiny.data == dense.data
