"""A spec is made small without becoming another kind of model, and stays one that the loader accepts."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from moegraph.errors import SpecError
from moegraph.lowering import lower
from moegraph.specs import Spec, load_spec
from moegraph.verify.layout import layout_text, with_world
from moegraph.verify.passes import verify_spec
from moegraph.verify.reduce import reduce_spec
from tests.small_models import small_spec

PRESETS = ["tiny", "tiny-dense", "olmo3-47b", "olmo3-ultra-2t"]
BIG_MOE = {"num_experts": 256, "top_k": 8, "d_ff": 2048}


def big(*overrides: str, **moe: Any) -> Spec:
    """A model of DeepSeek-V3's proportions."""
    return load_spec(
        {
            "spec_version": 1,
            "model": {
                "vocab_size": 129280,
                "d_model": 7168,
                "num_layers": 6,
                "attention": {"num_heads": 64, "num_kv_heads": 8, "head_dim": 128},
                "dense": {"d_ff": 18432, "layers": [0, 1]},
                "moe": {**BIG_MOE, **moe},
            },
            "train": {"steps": 3, "tokens_per_step": 65536},
            "data": {"source": "corpus:python-stdlib", "seq_len": 4096},
        },
        overrides,
    )


def structure(spec: Spec) -> dict[str, Any]:
    """Everything about a spec that is not a size."""
    model, moe = spec.model, spec.model.moe
    found: dict[str, Any] = {
        "layers": [(model.is_dense(i), model.window(i) is not None) for i in range(model.num_layers)],
        "norm": model.norm,
        "rope": model.attention.rope,
        "qk_norm": model.attention.qk_norm,
        "shares_keys": model.attention.num_heads > model.num_kv_heads,
        "one_key_head": model.num_kv_heads == 1,
        "tied": model.tie_embeddings,
        "passes": spec.passes,
        "precision": spec.precision,
        "pipeline": (spec.layout.pp, spec.layout.schedule, spec.layout.stages, spec.layout.microbatches),
        "dispatch": (spec.layout.ep > 1, spec.layout.transport, spec.layout.overflow),
        "document_mask": spec.data.document_mask,
        "scales": (model.embedding_scale, model.residual_scale, model.logit_scale),
    }
    if moe is not None:
        groups = moe.router.groups
        found |= {
            "router": moe.router.model_copy(update={"groups": None}),
            "groups": groups and (groups.score, groups.fill, groups.keep < groups.n),
            "balance": moe.balance,
            "chooses_all": moe.top_k == moe.num_experts,
            "one_choice": moe.top_k == 1,
            "shared": moe.shared and moe.shared.gate,
        }
    return found


@pytest.mark.parametrize("preset", [*PRESETS[:3], pytest.param(PRESETS[3], marks=pytest.mark.slow)])
def test_every_preset_keeps_its_structure_and_is_proved_in_seconds(preset: str) -> None:
    spec = load_spec(f"presets/{preset}.yaml")
    small, text = reduce_spec(spec)
    assert structure(small) == structure(spec)
    assert {i.kind for i in lower(small).instances} == {i.kind for i in lower(spec).instances}
    assert "seq_len" in text
    started = time.process_time()
    report = verify_spec(spec)
    assert time.process_time() - started < 30
    assert report.ok
    assert report.reduced == text
    assert all(row.planted_found is not False for row in report.rows)


SHAPES: dict[str, Spec] = {
    "deepseek": big(
        "model.moe.router={score: sigmoid, select_bias: learned_free, groups: {n: 8, keep: 4}, norm: {kind: sum}}"
    ),
    "one group kept": big("model.moe.router={groups: {n: 4, keep: 1, score: max}}"),
    "every group kept": big("model.moe.router={groups: {n: 16, keep: 16}}"),
    "pairs": big("model.moe.router={groups: {n: 128, keep: 100}}"),
    "singles": big("model.moe.router={groups: {n: 256, keep: 8, score: max}}"),
    "a third of the rope": big("model.attention.head_dim=120", "model.attention.rope.fraction=0.35"),
    "half rope": big("model.attention.rope.fraction=0.5"),
    "every expert": big(top_k=256),
    "one expert": big(num_experts=1, top_k=1),
    "many shared": big(shared={"num_experts": 16, "gate": "sigmoid"}),
    "one key head": big("model.attention.num_kv_heads=1"),
    "three queries a key": big("model.attention.num_heads=96", "model.attention.num_kv_heads=32"),
    "windows": big("model.attention.window={size: 128, pattern: LLG}"),
    "interleaved pipeline": big(
        "layout={pp: 2, schedule: interleaved_1f1b, microbatches: 4, dp: 2, ep: 2, transport: padded, capacity: 2.0}"
    ),
    "all forwards first": big(
        "layout={schedule: gpipe, microbatches: 4}", "model.moe.balance={over: global_batch, coef: 0.1}"
    ),
    "few tokens": big("data.seq_len=60", "train.tokens_per_step=60"),
    "recomputed layers": big("passes.recompute={policy: full, layers: [3]}"),
}


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_keeps_its_structure(name: str) -> None:
    spec = SHAPES[name]
    small, text = reduce_spec(spec)
    assert structure(small) == structure(spec)
    assert small.model.d_model == 64
    assert small.data.seq_len == min(48, spec.data.seq_len)
    assert "d_model 7168 → 64" in text
    moe = small.model.moe
    assert moe is not None
    assert moe.num_experts <= 8 or moe.router.groups is not None
    assert sum(parameter.numel for parameter in lower(small).parameters.values()) < 2_000_000


def test_what_is_small_already_is_left_alone() -> None:
    spec = small_spec()
    small, text = reduce_spec(spec)
    assert text == "tokens_per_step 64 → 32"
    assert small.model == spec.model


def test_steps_cut_short_from_the_command_line_need_not_fit_the_schedule() -> None:
    small, _ = reduce_spec(load_spec("presets/tiny.yaml", ["train.steps=5"]))
    assert small.train.steps == 5


def random_overrides(seed: int) -> list[str]:
    """Overrides drawn from everything that interacts with a size; not every draw is a valid spec."""
    pick = random.Random(seed)
    groups = pick.choice([None, None, 2, 4, 8])
    router = {
        "score": pick.choice(["softmax", "sigmoid"]),
        "norm": {"kind": pick.choice(["none", "sum"])},
        "groups": None if groups is None else {"n": groups, "keep": pick.randint(1, groups)},
    }
    pp, dp, many = pick.choice([1, 2]), pick.choice([1, 2, 4, 6]), pick.choice([1, 2, 4, 8])
    schedule = pick.choice(["1f1b", "gpipe", *(["interleaved_1f1b", "zbv_zero_bubble"] if pp == 2 else [])])
    kv_heads = pick.choice([1, 2, 6, 8])
    experts = pick.choice([1, 8, 48, 256])
    return [
        f"model.d_model={pick.choice([64, 1024, 4096])}",
        f"model.attention={{num_heads: {kv_heads * pick.choice([1, 3, 8])}, num_kv_heads: {kv_heads}, "
        f"head_dim: {pick.choice([8, 16, 80, 128])}, rope: {{fraction: {pick.choice([1.0, 0.5, 0.25])}}}}}",
        f"model.moe={{num_experts: {experts}, top_k: {min(experts, pick.choice([1, 2, 6, 8, 48]))}, "
        f"d_ff: {pick.choice([8, 2048])}, router: {router}}}".replace("'", '"').replace("None", "null"),
        f"layout={{dp: {dp}, ep: {pick.choice([1, dp])}, pp: {pp}, schedule: {schedule}, microbatches: {many}}}",
        f"data.seq_len={(length := pick.choice([1, 7, 48, 60, 100, 4096]))}",
        f"train.tokens_per_step={length * dp * many * pick.choice([1, 2, 3, 16])}",
    ]


def test_of_random_specs_every_valid_one_is_reduced_to_a_valid_one() -> None:
    reduced = 0
    for seed in range(150):
        try:
            spec = big(*random_overrides(seed))
        except SpecError:
            continue
        small, _ = reduce_spec(spec)  # raises SpecError if it broke a rule
        assert structure(small) == structure(spec), seed
        assert small.sequences_per_microbatch >= 1
        assert load_spec(small.model_dump(mode="json", by_alias=True)) == small
        reduced += 1
    assert reduced >= 30


def test_experts_are_spread_over_few_ranks_with_room_for_any_routing() -> None:
    small, text = reduce_spec(load_spec("presets/olmo3-ultra-2t.yaml"))
    assert (small.layout.dp, small.layout.ep, small.layout.pp, small.layout.capacity) == (4, 4, 8, 4.0)
    assert "dp 64 → 4, ep 32 → 4, capacity 1.25 → 4, so that no bucket overflows" in text


@pytest.mark.parametrize(
    ("layout", "world", "expected"),
    [
        ("{}", 1, "world 1 = dp 1 × pp 1, ep 1"),
        ("{}", 8, "world 8 = dp 8 × pp 1, ep 8, transport padded, capacity 1.25, overflow replay"),
        ("{}", 6, "world 6 = dp 6 × pp 1, ep 2, transport padded, capacity 1.25, overflow replay"),
        ("{dp: 2, ep: 2}", 2, "world 2 = dp 2 × pp 1, ep 2, transport exact"),
        ("{dp: 2, ep: 2}", 8, "world 8 = dp 8 × pp 1, ep 2, transport exact"),
        (
            "{dp: 4, ep: 4, pp: 2, schedule: zbv_zero_bubble, microbatches: 2}",
            4,
            "world 4 = dp 2 × pp 2, ep 2, transport exact, schedule zbv_zero_bubble",
        ),
        (
            "{dp: 4, ep: 4, pp: 2, schedule: zbv_zero_bubble, microbatches: 2}",
            3,
            "world 3 = dp 3 × pp 1, ep 1",
        ),
        ("{dp: 2, ep: 2, transport: padded, capacity: 3, overflow: drop}", 1, "world 1 = dp 1 × pp 1, ep 1"),
    ],
)
def test_a_world_of_another_size_has_a_layout_near_the_specs(layout: str, world: int, expected: str) -> None:
    spec = small_spec("train.tokens_per_step=128", f"layout={layout}")
    found = with_world(spec, world)
    assert layout_text(found.layout) == expected
    small, _ = reduce_spec(found, most_ranks=world)
    assert small.layout.world == world
    assert small.layout.ep == found.layout.ep


def test_every_random_spec_has_a_layout_of_every_world() -> None:
    tried = 0
    for seed in range(60):
        try:
            spec = big(*random_overrides(seed))
        except SpecError:
            continue
        for world in (1, 2, 3, 8, 24):
            small, _ = reduce_spec(with_world(spec, world), most_ranks=world)
            assert small.layout.world <= world
            tried += 1
    assert tried >= 50
