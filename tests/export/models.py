"""Small models of every architecture that can be written, ours and theirs, and their logits on the same tokens."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moegraph.export.source import Read
from moegraph.graph.program import Port
from moegraph.lowering import lower
from moegraph.specs import Spec
from moegraph.verify.run import execute
from tests.small_models import small_spec

VOCAB, LENGTH, ROWS, WIDTH = 64, 24, 2, 32
GQA = {"num_heads": 4, "num_kv_heads": 2}
WIDE_HEADS = {**GQA, "head_dim": 16}  # d_model / num_heads is 8
SUM = {"norm": {"kind": "sum"}}
V3 = {"score": "sigmoid", "select_bias": "learned_free", "norm": {"kind": "sum", "eps": 1e-20}}
CLAMPED = {"kind": "swiglu_clamped", "alpha": 1.5, "limit": 0.75}
DENSE = {"d_ff": 48, "layers": "all"}


def experts(**more: Any) -> dict[str, Any]:
    return {"num_experts": 8, "top_k": 2, "d_ff": 16, **more}


# By architecture: what of the `model` section is not the same in all. d_model is 2 · d_ff in most: gate and up together
# are square, and a transposed matrix would not be seen by its shape. Two have other widths.
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {
        "attention": {**GQA, "window": {"size": 5}, "rope": {"theta": 1e6}},
        "moe": experts(router=SUM),
        "norm": {"eps": 1e-5},
    },
    "qwen3_moe": {
        "attention": {**WIDE_HEADS, "qk_norm": "per_head"},
        "moe": experts(d_ff=WIDTH, router=SUM),
        "dense": {"d_ff": 48, "layers": [1]},
        "tie_embeddings": True,
    },
    "qwen2_moe": {
        "attention": {**GQA, "qkv_bias": True},
        "moe": experts(d_ff=24, shared={"num_experts": 1, "d_ff": 20, "gate": "sigmoid"}),
    },
    "olmoe": {"attention": {"num_heads": 4, "qk_norm": "full"}, "moe": experts(), "norm": {"eps": 1e-5}},
    "flex_olmo": {
        "attention": {**GQA, "qk_norm": "full", "rope": {"theta": 5e5}},
        "moe": experts(top_k=3),
        "norm": {"placement": "post"},
    },
    "dots1": {
        "attention": {**WIDE_HEADS, "qk_norm": "per_head", "window": {"size": 5, "pattern": "GL"}},
        "moe": experts(shared={"num_experts": 2}, router={**V3, "scale": 2.5}),
        "dense": {"d_ff": 48, "layers": [0]},
    },
    "glm4_moe": {
        "attention": {**WIDE_HEADS, "qk_norm": "per_head", "qkv_bias": True, "rope": {"fraction": 0.5}},
        "moe": experts(shared={"num_experts": 1}, router={**V3, "scale": 1.5, "groups": {"n": 4, "keep": 2}}),
        "dense": {"d_ff": 48, "layers": [0]},
        "norm": {"eps": 1e-5},
    },
    "minimax_m2": {
        "attention": {**WIDE_HEADS, "qk_norm": "full", "rope": {"fraction": 0.5}},
        "moe": experts(router={"score": "sigmoid", "select_bias": "learned_free", **SUM}),
    },
    "gpt_oss": {
        "attention": {
            **WIDE_HEADS, "qkv_bias": True, "output_bias": True, "window": {"size": 5, "pattern": "LG"},
            "rope": {"theta": 150000},
        },
        "moe": experts(
            d_ff=WIDTH, expert_bias=True, activation=CLAMPED,
            router={"score": "none", "weight_from": "softmax_selected", "gate_bias": True},
        ),
        "norm": {"eps": 1e-5},
    },
    "granitemoe": {
        "attention": GQA,
        "moe": experts(router=SUM),
        "embedding_scale": 6.0,
        "residual_scale": 0.25,
        "logit_scale": 0.125,
    },
    "granitemoeshared": {
        "attention": {**GQA, "qkv_bias": True, "output_bias": True},
        "moe": experts(router=SUM, shared={"num_experts": 1, "d_ff": 20}),
    },
    "ernie4_5_moe": {
        "attention": {**GQA, "rope": {"interleaved": True, "theta": 5e5}},
        "moe": experts(
            shared={"num_experts": 2},
            router={"select_bias": "learned_free", "norm": {"kind": "sum", "eps": 1e-12, "mode": "clamp"}},
        ),
        "dense": {"d_ff": 48, "layers": [0]},
    },
    "llama": {"attention": GQA, "moe": None, "dense": DENSE},
    "mistral": {"attention": {**WIDE_HEADS, "window": {"size": 5}}, "moe": None, "dense": DENSE},
    "qwen2": {"attention": {**GQA, "qkv_bias": True}, "moe": None, "dense": DENSE, "tie_embeddings": True},
    "qwen3": {
        "attention": {**WIDE_HEADS, "qk_norm": "per_head", "window": {"size": 5, "pattern": "GL"}},
        "moe": None,
        "dense": DENSE,
    },
    "olmo2": {
        "attention": {**GQA, "qk_norm": "full"}, "moe": None, "dense": DENSE, "norm": {"placement": "post"},
    },
    "olmo3": {
        "attention": {**GQA, "qk_norm": "full", "window": {"size": 5, "pattern": "LG"}, "rope": {"theta": 5e5}},
        "moe": None,
        "dense": DENSE,
        "norm": {"placement": "post"},
    },
}  # fmt: skip


def spec_of(name: str, *overrides: str) -> Spec:
    """A spec in float32 whose model is one of the above."""
    model = {"vocab_size": VOCAB, "d_model": WIDTH, "num_layers": 2, "max_seq_len": 64, **MODELS[name]}
    sizes = ["precision.compute=fp32", f"train.tokens_per_step={ROWS * LENGTH}", f"data.seq_len={LENGTH}"]
    return small_spec(*sizes, *overrides, model=model)


def random_values(spec: Spec, seed: int = 0) -> dict[str, Tensor]:
    """Every parameter and selection bias of a model, none at its initial value."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, parameter in lower(spec).parameters.items():
        spread = 0.15 if parameter.init == "normal" else 0.1
        base = 1.0 if parameter.init == "ones" else 0.0
        found[name] = base + torch.randn(parameter.global_shape, generator=generator) * spread
    return found


def reader(values: Mapping[str, Tensor]) -> Read:
    """What `write_model` reads with."""
    return lambda name, start, count: values[name].reshape(-1)[start : start + count].clone()


def some_tokens(seed: int = 1) -> Tensor:
    """[ROWS, LENGTH] token ids."""
    return torch.randint(0, VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))


def our_logits(spec: Spec, values: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
    """[tokens, VOCAB] of the lowered model, block by block, on one document per row."""
    program = lower(spec)
    places = torch.arange(LENGTH, dtype=torch.int32).repeat(ROWS, 1)
    inputs = {
        "tokens": tokens.reshape(-1), "positions": places, "document_ids": torch.zeros_like(places),
        "labels": tokens.reshape(-1), "inverse_targets": torch.tensor(1.0),
    }  # fmt: skip
    execution = None
    for instance in program.instances:
        given = {Port("input", name): value for name, value in inputs.items()}
        given |= {Port("parameter", local): values[name] for local, name in instance.parameters.items()}
        given |= {Port("buffer", local): values[name] for local, name in instance.parameters.items()}
        execution = execute(program.units[instance.kind], given)
        if instance.prefix != "head":
            inputs["hidden"] = execution.results[Port("hidden", "hidden")].detach()
    assert execution is not None
    found: Tensor = execution.values["scaled_logits"].detach()
    return found


def load_theirs(folder: Path, **options: Any) -> Any:
    """The directory as transformers loads it; every tensor has found its place and every place its tensor."""
    transformers = pytest.importorskip("transformers", minversion="5.24")
    warnings.simplefilter("ignore")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager", experts_implementation="eager", **options
    )
    assert not any(info.values()), info
    return model.eval()
