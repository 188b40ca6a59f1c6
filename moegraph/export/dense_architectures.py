"""The published architectures without experts that moegraph can write, in the order in which they are tried."""

from __future__ import annotations

from typing import Any

from moegraph.export import settings as s
from moegraph.export.architecture import Architecture
from moegraph.export.rules import FREE, SAME_AS_QKV, only, window
from moegraph.specs.schema.model import Model

ONE_BIAS_FLAG = {"attention.qkv_bias": FREE, "attention.output_bias": SAME_AS_QKV}
DENSE = {"moe": only(None), "dense": FREE}
AFTER = {"norm.placement": only("post"), "attention.qk_norm": only("full")}


def _llama(model: Model) -> dict[str, Any]:
    more = {"mlp_bias": False, "pretraining_tp": 1}
    return {**s.base(model), **s.attention_bias(model), "head_dim": model.head_dim, **s.dense_width(model), **more}


def _mistral(model: Model) -> dict[str, Any]:
    return {**s.base(model), **s.head_dim(model), **s.window_for_all(model), **s.dense_width(model)}


def _qwen_windows(model: Model) -> dict[str, Any]:
    windows = s.layer_types(model)
    first = 0 if windows["sliding_window"] is not None else model.num_layers
    return {**windows, "use_sliding_window": windows["sliding_window"] is not None, "max_window_layers": first}


def _qwen2(model: Model) -> dict[str, Any]:
    return {**s.base(model), **_qwen_windows(model), **s.dense_width(model)}


def _qwen3(model: Model) -> dict[str, Any]:
    return {**_qwen2(model), **s.head_dim(model), **s.attention_bias(model)}


def _olmo2(model: Model) -> dict[str, Any]:
    return {**s.base(model), **s.attention_bias(model), **s.dense_width(model)}


def _olmo3(model: Model) -> dict[str, Any]:
    rope = s.base(model)["rope_parameters"]
    both = {"full_attention": rope, "sliding_attention": rope}
    return {**_olmo2(model), **s.layer_types(model), "rope_parameters": both}


DENSE_ARCHITECTURES = (
    Architecture("llama", "LlamaForCausalLM", {**DENSE, **ONE_BIAS_FLAG}, _llama),
    Architecture(
        "mistral", "MistralForCausalLM",
        {**DENSE, "attention.head_dim": FREE, "attention.window": window(every_layer=True)}, _mistral,
    ),
    Architecture(
        "qwen2", "Qwen2ForCausalLM",
        {**DENSE, "attention.qkv_bias": only(True), "attention.window": window(every_layer=False)}, _qwen2,
        tokenizer_note="AutoTokenizer gives every qwen2 Qwen's own tokenizer: load this with PreTrainedTokenizerFast",
    ),
    Architecture(
        "qwen3", "Qwen3ForCausalLM",
        {
            **DENSE, **ONE_BIAS_FLAG, "attention.head_dim": FREE, "attention.qk_norm": only("per_head"),
            "attention.window": window(every_layer=False),
        },
        _qwen3,
    ),
    Architecture("olmo2", "Olmo2ForCausalLM", {**DENSE, **AFTER, **ONE_BIAS_FLAG}, _olmo2),
    Architecture(
        "olmo3", "Olmo3ForCausalLM",
        {**DENSE, **AFTER, **ONE_BIAS_FLAG, "attention.window": window(every_layer=False)}, _olmo3,
    ),
)  # fmt: skip
