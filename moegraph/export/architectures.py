"""The published architectures that moegraph can write, in the order in which they are tried.

Each says what it leaves open or demands; `rules` refuses the rest. The functions give its config.json.
"""

from __future__ import annotations

from typing import Any

from moegraph.export import settings as s
from moegraph.export.architecture import Architecture
from moegraph.export.dense_architectures import DENSE_ARCHITECTURES, ONE_BIAS_FLAG
from moegraph.export.names import Names
from moegraph.export.rules import (
    FIRST_LAYERS_DENSE,
    FREE,
    REQUIRED,
    ROTARY_FRACTION,
    SUM,
    SUM_OR_NONE,
    SUM_PLUS_TINY,
    Rule,
    dense_layers,
    only,
    shared,
    shared_width,
    window,
)
from moegraph.specs.schema.model import Model

EXPERTS = {"moe": REQUIRED}


def _qwen_experts(model: Model) -> dict[str, Any]:
    width = {"moe_intermediate_size": s.experts_of(model).d_ff}
    return {**s.dense_width(model), **width, **s.routed(model), **s.normed(model), **s.sparse_layers(model)}


def _qwen3_moe(model: Model) -> dict[str, Any]:
    attention = {**s.head_dim(model), **s.attention_bias(model), **s.qwen_window(model)}
    return {**s.base(model), **attention, **_qwen_experts(model)}


def _qwen2_moe(model: Model) -> dict[str, Any]:
    attention = {"qkv_bias": model.attention.qkv_bias, "use_sliding_window": False, **s.layer_types(model)}
    width = {"shared_expert_intermediate_size": shared_width(model), "max_window_layers": model.num_layers}
    return {**s.base(model), **attention, **width, **_qwen_experts(model)}


def _olmoe(model: Model) -> dict[str, Any]:
    attention = {**s.attention_bias(model), "clip_qkv": None}
    return {**_flex_olmo(model), **attention}


def _flex_olmo(model: Model) -> dict[str, Any]:
    return {
        **s.base(model),
        **s.attention_bias(model),
        **s.routed(model),
        **s.normed(model),
        "intermediate_size": s.experts_of(model).d_ff,
    }


def _mixtral(model: Model) -> dict[str, Any]:
    experts = {**s.routed(model, "num_local_experts"), "router_jitter_noise": 0.0}
    width = {"intermediate_size": s.experts_of(model).d_ff}
    return {**s.base(model), **s.head_dim(model), **s.window_for_all(model), **width, **experts}


def _minimax_m2(model: Model) -> dict[str, Any]:
    rope = {**s.partial_rotary(model), "rotary_dim": round(model.head_dim * s.rope_of(model).fraction)}
    flags = {"use_qk_norm": True, "scoring_func": "sigmoid", "use_routing_bias": True}
    return {**_mixtral(model), **rope, **flags, "sliding_window": None}


def _deepseek_experts(model: Model) -> dict[str, Any]:
    moe = s.experts_of(model)
    return {
        "moe_intermediate_size": moe.d_ff,
        "n_shared_experts": shared_width(model) // moe.d_ff,
        "n_routed_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "first_k_dense_replace": len(dense_layers(model)),
        "output_router_logits": False,
        **s.dense_width(model),
        **s.normed(model),
        **s.grouped(model),
    }


def _glm4_moe(model: Model) -> dict[str, Any]:
    attention = {**s.head_dim(model), **s.attention_bias(model), "use_qk_norm": model.attention.qk_norm == "per_head"}
    more = {"num_nextn_predict_layers": 0}
    return {**s.base(model), **s.partial_rotary(model), **attention, **_deepseek_experts(model), **more}


def _dots1(model: Model) -> dict[str, Any]:
    attention = {**s.head_dim(model), **s.attention_bias(model), **s.layer_types(model)}
    more = {"max_window_layers": model.num_layers, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    return {**s.base(model), **attention, **_deepseek_experts(model), **more}


def _gpt_oss(model: Model) -> dict[str, Any]:
    moe = s.experts_of(model)
    assert moe.activation != "swiglu"
    experts = {
        "intermediate_size": moe.d_ff,
        "swiglu_alpha": moe.activation.alpha,
        "swiglu_limit": moe.activation.limit,
    }
    attention = {**s.head_dim(model), **s.attention_bias(model), **s.layer_types(model, unused=model.max_seq_len)}
    return {**s.base(model), **attention, **experts, **s.routed(model, "num_local_experts")}


def _gpt_oss_note(model: Model) -> str:
    missing = [] if s.experts_of(model).expert_bias else ["biases of the experts"]
    missing += [] if s.experts_of(model).router.gate_bias else ["the router's bias"]
    zeros = f"; {' and '.join(missing)} are zeros" if missing else ""
    return f"gpt_oss has attention sinks and this model has none: they are -1e9, which takes nothing{zeros}"


def _granite(model: Model) -> dict[str, Any]:
    scales = {
        "embedding_multiplier": model.embedding_scale,
        "residual_multiplier": model.residual_scale,
        "logits_scaling": 1 / model.logit_scale,
        "attention_multiplier": model.head_dim**-0.5,
    }
    width = {"intermediate_size": s.experts_of(model).d_ff, "shared_intermediate_size": shared_width(model)}
    return {**s.base(model), **s.attention_bias(model), **scales, **width, **s.routed(model, "num_local_experts")}


def _ernie(model: Model) -> dict[str, Any]:
    moe = s.experts_of(model)
    sparse = [layer for layer in range(model.num_layers) if not model.is_dense(layer)]
    return {
        **s.base(model),
        **s.dense_width(model),
        "use_bias": False,
        "moe_intermediate_size": moe.d_ff,
        "moe_k": moe.top_k,
        "moe_num_experts": moe.num_experts,
        "moe_num_shared_experts": shared_width(model) // moe.d_ff,
        "moe_layer_start_index": sparse[0],
        "moe_layer_end_index": sparse[-1],
        "moe_layer_interval": 1,
        "moe_norm_min": moe.router.norm.eps,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.0,
    }


def _outer_layers(value: object, model: Model) -> bool:
    sparse = [layer for layer in range(model.num_layers) if not model.is_dense(layer)]
    return not sparse or len(sparse) == sparse[-1] - sparse[0] + 1


DEEPSEEK_ROUTER = {
    "moe.num_experts": Rule(lambda value, model: value > 1, "two or more"),  # its group scores add the best two
    "moe.router.score": only("sigmoid"),
    "moe.router.select_bias": FREE,
    "moe.router.norm": SUM_PLUS_TINY,
    "moe.router.scale": FREE,
    "moe.router.groups": Rule(
        lambda value, model: value is None or (value.score, value.fill) == ("top2_sum", "-inf"),
        "none, or some with score top2_sum and fill -inf",
    ),
    "moe.shared": shared(gate="none", whole=True),
    "dense": FIRST_LAYERS_DENSE,
}
CORRECTION = "gate.e_score_correction_bias"
MIXTRAL_EXPERTS = ("experts.{}.w1", "experts.{}.w3", "experts.{}.w2")
GRANITE_RULES = {
    **EXPERTS,
    **ONE_BIAS_FLAG,
    "embedding_scale": FREE,
    "residual_scale": FREE,
    "logit_scale": FREE,
    "moe.router.norm": SUM,
}
GRANITE_NAMES = Names(
    block="block_sparse_moe",
    router="router.layer",
    experts="packed",
    packed=("input_linear.weight", "output_linear.weight"),
    shared_packed=("shared_mlp.input_linear.weight", "shared_mlp.output_linear.weight"),
)

MIXTURES = (
    Architecture(
        "mixtral", "MixtralForCausalLM",
        {**EXPERTS, "attention.head_dim": FREE, "attention.window": window(every_layer=True), "moe.router.norm": SUM},
        _mixtral, Names(block="block_sparse_moe", each=MIXTRAL_EXPERTS),
    ),
    Architecture(
        "qwen3_moe", "Qwen3MoeForCausalLM",
        {
            **EXPERTS, **ONE_BIAS_FLAG, "attention.head_dim": FREE, "attention.qk_norm": only("per_head"),
            "attention.window": window(every_layer=True), "dense": FREE, "moe.router.norm": SUM_OR_NONE,
        },
        _qwen3_moe,
    ),
    Architecture(
        "qwen2_moe", "Qwen2MoeForCausalLM",
        {
            **EXPERTS, "attention.qkv_bias": FREE, "dense": FREE, "moe.router.norm": SUM_OR_NONE,
            "moe.shared": shared(gate="sigmoid"),
        },
        _qwen2_moe, Names(shared="mlp.shared_expert", shared_gate="mlp.shared_expert_gate"),
    ),
    Architecture(
        "olmoe", "OlmoeForCausalLM",
        {**EXPERTS, **ONE_BIAS_FLAG, "attention.qk_norm": only("full"), "moe.router.norm": SUM_OR_NONE},
        _olmoe,
    ),
    Architecture(
        "flex_olmo", "FlexOlmoForCausalLM",
        {
            **EXPERTS, **ONE_BIAS_FLAG, "norm.placement": only("post"), "attention.qk_norm": only("full"),
            "moe.router.norm": SUM_OR_NONE,
        },
        _flex_olmo,
    ),
    Architecture(
        "glm4_moe", "Glm4MoeForCausalLM",
        {
            **EXPERTS, "attention.head_dim": FREE, "attention.qk_norm": only("none", "per_head"),
            "attention.qkv_bias": FREE, "attention.rope.fraction": ROTARY_FRACTION, **DEEPSEEK_ROUTER,
        },
        _glm4_moe, Names(shared="mlp.shared_experts", select_bias=CORRECTION),
    ),
    Architecture(
        "dots1", "Dots1ForCausalLM",
        {
            **EXPERTS, **ONE_BIAS_FLAG, "attention.head_dim": FREE, "attention.qk_norm": only("per_head"),
            "attention.window": window(every_layer=False), **DEEPSEEK_ROUTER,
        },
        _dots1, Names(shared="mlp.shared_experts", select_bias=CORRECTION),
    ),
    Architecture(
        "minimax_m2", "MiniMaxM2ForCausalLM",
        {
            **EXPERTS, "attention.head_dim": FREE, "attention.qk_norm": only("full"),
            "attention.rope.fraction": ROTARY_FRACTION, "moe.router.score": only("sigmoid"),
            "moe.router.select_bias": FREE, "moe.router.norm": SUM,
        },
        _minimax_m2,
        Names(block="block_sparse_moe", each=MIXTRAL_EXPERTS, select_bias="e_score_correction_bias"),
    ),
    Architecture(
        "gpt_oss", "GptOssForCausalLM",
        {
            **EXPERTS, **ONE_BIAS_FLAG, "attention.head_dim": FREE, "attention.window": window(every_layer=False),
            "moe.expert_bias": FREE, "moe.router.gate_bias": FREE, "moe.router.norm": SUM,
            "moe.activation": Rule(lambda value, model: value != "swiglu", "swiglu_clamped"),
        },
        _gpt_oss, Names(router="router", experts="pairs", sinks=True), _gpt_oss_note,
    ),
    Architecture("granitemoe", "GraniteMoeForCausalLM", GRANITE_RULES, _granite, GRANITE_NAMES),
    Architecture(
        "granitemoeshared", "GraniteMoeSharedForCausalLM", {**GRANITE_RULES, "moe.shared": shared(gate="none")},
        _granite, GRANITE_NAMES,
    ),
    Architecture(
        "ernie4_5_moe", "Ernie4_5_MoeForCausalLM",
        {
            **EXPERTS, "attention.rope.interleaved": only(True), "moe.router.select_bias": FREE,
            "dense": Rule(_outer_layers, "none, or the first and last layers"),
            "moe.shared": shared(gate="none", whole=True, optional=True),
            "moe.router.norm": Rule(
                lambda value, model: value.kind == "sum" and (value.mode == "clamp" or value.eps == 0),
                "kind sum with mode clamp",
            ),
        },
        _ernie,
        Names(
            shared="mlp.shared_experts", select_bias="moe_statics.e_score_correction_bias", select_bias_row=True
        ),
    ),
)  # fmt: skip

ARCHITECTURES = (*MIXTURES, *DENSE_ARCHITECTURES)
