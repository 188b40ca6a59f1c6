"""Which architecture a model is: exactly one that computes the same, or none and a sentence that says why."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moegraph.errors import ExportError, SpecError
from moegraph.export.architecture import choose
from moegraph.export.architectures import ARCHITECTURES
from moegraph.export.model_directory import write_model
from moegraph.specs import load_spec
from moegraph.specs.fields import walk
from tests.export.models import MODELS, load_theirs, our_logits, random_values, reader, some_tokens, spec_of
from tests.small_models import relative_error

R, A = "model.moe.router", "model.attention"
CHANGES = (
    "model.norm.placement=post",
    "model.norm.placement=both",
    "model.norm.eps=1e-3",
    "model.tie_embeddings=true",
    "model.embedding_scale=3",
    "model.residual_scale=0.5",
    "model.logit_scale=0.25",
    f"{A}.qk_norm=none",
    f"{A}.qk_norm=per_head",
    f"{A}.qk_norm=full",
    f"{A}.qkv_bias=true",
    f"{A}.output_bias=true",
    f"{A}.head_dim=24",
    f"{A}.num_kv_heads=1",
    f"{A}.window={{size: 3}}",
    f"{A}.window={{size: 3, pattern: GL}}",
    f"{A}.window=null",
    f"{A}.rope=null",
    f"{A}.rope={{theta: 500}}",
    f"{A}.rope={{fraction: 0.25}}",
    f"{A}.rope={{interleaved: true}}",
    "model.dense={d_ff: 40, layers: [0]}",
    "model.dense={d_ff: 40, layers: [1]}",
    "model.moe.top_k=3",
    "model.moe.d_ff=12",
    "model.moe.activation={kind: swiglu_clamped, alpha: 1.2, limit: 0.5}",
    "model.moe.expert_bias=true",
    "model.moe.output_bias=true",
    "model.moe.shared={num_experts: 3}",
    "model.moe.shared={num_experts: 1, d_ff: 12}",
    "model.moe.shared={num_experts: 1, gate: sigmoid}",
    "model.moe.shared=null",
    f"{R}.gate_bias=true",
    f"{R}.scale=2",
    f"{R}.apply=input",
    f"{R}={{norm: {{kind: sum}}}}",
    f"{R}={{norm: {{kind: sum, eps: 0.01}}}}",
    f"{R}={{norm: {{kind: none}}}}",
    f"{R}={{score: none, weight_from: softmax_selected}}",
    f"{R}={{score: sigmoid, weight_from: softmax_selected}}",
    f"{R}={{score: softmax, weight_from: sigmoid_selected, norm: {{kind: sum}}}}",
    f"{R}={{score: sigmoid, norm: {{kind: sum, eps: 1e-20}}}}",
    f"{R}={{score: sigmoid, norm: {{kind: sum}}, groups: {{n: 4, keep: 4}}}}",
    f"{R}={{score: softmax, norm: {{kind: sum}}, groups: {{n: 4, keep: 2}}}}",
    f"{R}={{score: sigmoid, norm: {{kind: sum, eps: 1e-20}}, groups: {{n: 4, keep: 2, score: max}}}}",
    f"{R}={{select_bias: learned_free, norm: {{kind: sum}}}}",
    f"{R}={{select_bias: learned_free, weight_from: softmax_selected}}",
    f"{R}={{norm: {{kind: sum, eps: 1e-3, mode: clamp}}}}",
)  # fmt: skip
EVERYDAY = {
    ("mixtral", f"{R}={{score: none, weight_from: softmax_selected}}"),
    ("qwen3_moe", f"{A}.window={{size: 3}}"),
    ("olmoe", f"{R}={{score: sigmoid, weight_from: softmax_selected}}"),
    ("qwen3", f"{A}.window=null"),
    ("dots1", f"{R}={{score: sigmoid, norm: {{kind: sum, eps: 1e-20}}}}"),
    ("gpt_oss", "model.moe.expert_bias=false"),
    ("gpt_oss", f"{A}.window=null"),
    ("ernie4_5_moe", f"{R}={{norm: {{kind: sum}}}}"),
    ("llama", f"{A}.head_dim=24"),
}


def pairs() -> list[object]:
    every = {(name, change) for name in MODELS for change in CHANGES if MODELS[name]["moe"] or "moe" not in change}
    marks = pytest.mark.slow
    return [pair if pair in EVERYDAY else pytest.param(*pair, marks=marks) for pair in sorted(every | EVERYDAY)]


@pytest.mark.parametrize(("name", "change"), pairs())
def test_a_model_with_one_change_is_refused_or_computes_the_same(name: str, change: str, tmp_path: Path) -> None:
    try:
        spec = spec_of(name, change)
    except SpecError:
        return  # some changes contradict a model
    try:
        architecture = choose(spec.model, ARCHITECTURES)
    except ExportError:
        assert (name, change) not in EVERYDAY
        return
    values, tokens = random_values(spec), some_tokens()
    write_model(tmp_path, spec.model, architecture, reader(values), "float32")
    with torch.no_grad():
        found = load_theirs(tmp_path)(input_ids=tokens).logits.flatten(0, 1)
    assert relative_error(found, our_logits(spec, values, tokens)) < 1e-5


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("qwen3_moe", "model.norm.placement=both", "model.norm.placement is both, and it has pre"),
        ("qwen3_moe", f"{A}.qk_norm=full", "model.attention.qk_norm is full, and it has per_head"),
        ("qwen3_moe", f"{A}.rope.fraction=0.5", "model.attention.rope.fraction is 0.5, and it has 1.0"),
        ("qwen3_moe", f"{A}.rope=null", "model.attention.rope is none, and it has one"),
        ("qwen3_moe", f"{A}.output_bias=true", "model.attention.output_bias is true, and it has the same as qkv_bias"),
        ("qwen3_moe", "model.moe.output_bias=true", "model.moe.output_bias is true, and it has false"),
        ("qwen3_moe", f"{R}.norm.eps=0.01", "model.moe.router.norm is {kind: sum, eps: 0.01, mode: add}"),
        ("qwen3_moe", f"{R}.apply=input", "model.moe.router.apply is input, and it has output"),
        ("olmoe", f"{A}.head_dim=24", "model.attention.head_dim is 24, and it has d_model / num_heads"),
        ("olmoe", "model.dense={d_ff: 8, layers: [0]}", "model.dense is {d_ff: 8, layers: [0]}, and it has none"),
        ("glm4_moe", "model.dense={d_ff: 8, layers: [1]}", "it has none, or the first layers"),
        ("glm4_moe", "model.moe.shared.d_ff=12", "it has shared experts with gate none of a multiple of"),
        ("glm4_moe", f"{R}.norm.eps=0", "it has none or kind sum with eps 1e-20"),
        ("llama", "model.logit_scale=2", "model.logit_scale is 2.0, and it has 1.0"),
    ],
)
def test_what_does_not_fit_an_architecture_is_named(name: str, change: str, said: str) -> None:
    with pytest.raises(ExportError) as raised:
        choose(spec_of(name, change).model, ARCHITECTURES, name)
    assert raised.value.exit_code == 2
    assert f"this model is not {name}:\n    model." in str(raised.value)
    assert said in str(raised.value)


def test_a_model_that_no_architecture_computes_is_refused_with_the_nearest_first() -> None:
    with pytest.raises(ExportError) as raised:
        choose(load_spec("presets/tiny.yaml").model, ARCHITECTURES)
    first, second, *rest, last = str(raised.value).splitlines()
    assert first == "none of the published architectures that can be written computes this model:"
    assert second == "    qwen3_moe: model.moe.shared is {num_experts: 1, d_ff: 128, gate: none}, and it has none"
    assert [line.split(":")[0].strip() for line in rest if "model." not in line] == []
    assert len(rest) == sum(each.experts for each in ARCHITECTURES) - 1
    assert rest[-1].endswith(" more)")
    assert "--architecture" in last
    assert choose(load_spec("presets/tiny-dense.yaml").model, ARCHITECTURES).name == "qwen3"


def test_the_settings_of_a_model_are_those_that_the_rules_were_written_for() -> None:
    """A setting that is added is refused by default, unless it is in a section that a rule looks at as a whole."""
    whole = ("model.attention.window", "model.moe.router.groups", "model.moe.router.norm", "model.moe.shared")
    found = {path for path, *_ in walk() if path.startswith((*whole, "model.dense."))}
    known = {
        "model.attention.window": ("size", "pattern", "rope"),
        "model.moe.router.groups": ("n", "keep", "score", "fill"),
        "model.moe.router.norm": ("kind", "eps", "mode"),
        "model.moe.shared": ("num_experts", "d_ff", "gate"),
        "model.dense": ("d_ff", "layers"),
    }
    deeper = {path for path in found if path.startswith("model.attention.window.rope.")}
    expected = {*whole, *(f"{path}.{name}" for path, names in known.items() for name in names)} - {"model.dense"}
    assert found - deeper == expected


def test_what_is_filled_in_is_said() -> None:
    gpt_oss = next(each for each in ARCHITECTURES if each.name == "gpt_oss")
    whole = gpt_oss.note(spec_of("gpt_oss").model)
    assert whole.endswith("they are -1e9, which takes nothing")
    bare = spec_of("gpt_oss", "model.moe.expert_bias=false", f"{R}.gate_bias=false").model
    assert gpt_oss.note(bare) == f"{whole}; biases of the experts and the router's bias are zeros"
