"""Values of config.json that several architectures share. Every value that decides a number is written out, also where
it is the default of a class; the rotary embedding in both of the forms that loaders know."""

from __future__ import annotations

from typing import Any

from moegraph.export.rules import dense_layers
from moegraph.specs.schema.attention import Rope
from moegraph.specs.schema.model import Model
from moegraph.specs.schema.moe import Moe

Settings = dict[str, Any]


def experts_of(model: Model) -> Moe:
    """The `moe` section of a model that has one."""
    assert model.moe is not None
    return model.moe


def rope_of(model: Model) -> Rope:
    """The rotary embedding, which every architecture here has."""
    assert model.attention.rope is not None
    return model.attention.rope


def base(model: Model) -> Settings:
    """Sizes, norm, rotary embedding, and that nothing is dropped out."""
    rope = rope_of(model)
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.d_model,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.attention.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "max_position_embeddings": model.max_seq_len,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm.eps,
        "tie_word_embeddings": model.tie_embeddings,
        "attention_dropout": 0.0,
        "initializer_range": model.init.std,
        "use_cache": True,
        "rope_theta": rope.theta,
        "rope_scaling": None,  # older loaders of gpt-oss scale unless they are told not to
        "rope_parameters": {"rope_type": "default", "rope_theta": rope.theta},
    }


def partial_rotary(model: Model) -> Settings:
    """A rotary embedding of the first part of each head."""
    rope = rope_of(model)
    both = {"rope_type": "default", "rope_theta": rope.theta, "partial_rotary_factor": rope.fraction}
    return {"partial_rotary_factor": rope.fraction, "rope_parameters": both}


def attention_bias(model: Model) -> Settings:
    """One flag for the biases of attention."""
    return {"attention_bias": model.attention.qkv_bias}


def head_dim(model: Model) -> Settings:
    """Where the width of a head need not be hidden_size / num_attention_heads."""
    return {"head_dim": model.head_dim}


def dense_width(model: Model) -> Settings:
    """The width of ordinary layers; of a model without any, the experts'."""
    return {"intermediate_size": model.dense.d_ff if model.dense is not None else experts_of(model).d_ff}


def routed(model: Model, number: str = "num_experts") -> Settings:
    """How many experts there are and how many a token visits. No auxiliary loss is claimed for fine-tuning: theirs is
    not the one that the model was trained with."""
    moe = experts_of(model)
    return {
        number: moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.0,
    }


def normed(model: Model) -> Settings:
    """Whether the chosen weights are divided by their sum."""
    return {"norm_topk_prob": experts_of(model).router.norm.kind == "sum"}


def sparse_layers(model: Model) -> Settings:
    """Which layers are ordinary ones, in Qwen's way."""
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense_layers(model)}


def grouped(model: Model) -> Settings:
    """Groups and scale in DeepSeek's way: one group where there are none."""
    groups = experts_of(model).router.groups
    return {
        "n_group": groups.n if groups is not None else 1,
        "topk_group": groups.keep if groups is not None else 1,
        "routed_scaling_factor": experts_of(model).router.scale,
    }


def layer_types(model: Model, unused: int | None = None) -> Settings:
    """Which layers have the window; `unused`: the size to write where none has."""
    windows = [model.window(layer) for layer in range(model.num_layers)]
    size = next((each for each in windows if each is not None), unused)
    names = ["full_attention" if each is None else "sliding_attention" for each in windows]
    return {"sliding_window": size, "layer_types": names}


def qwen_window(model: Model) -> Settings:
    """One window for all layers, in Qwen's way."""
    size = model.window(0)
    first = 0 if size is not None else model.num_layers  # layers from this one on have it
    return {"use_sliding_window": size is not None, "sliding_window": size, "max_window_layers": first}


def window_for_all(model: Model) -> Settings:
    """One window for all layers, in Mistral's way."""
    return {"sliding_window": model.window(0)}
