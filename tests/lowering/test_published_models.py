"""Whole models against transformers' own: logits, loss and every gradient, in fp32, from the same weights.

Each case is a published architecture at a toy size; together they cover every norm placement, both q/k norms, partial
and full rotary embedding, every way a router of these families scores and renormalises, shared experts with and
without a gate, biases (in experts too), plain and clamped SwiGLU, dense first layers and sliding windows. What moegraph
does not have yet is switched off in theirs: gpt-oss's attention sinks are so low that they take nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from moegraph.compiled import compile
from moegraph.data.loader import StepBatch
from moegraph.graph.program import Port
from moegraph.runtime.executor import Executor
from moegraph.runtime.gradients import GradientBuffers
from moegraph.runtime.step import StepComputer
from moegraph.verify.run import run_graph
from tests.small_models import CPU, relative_error, small_spec

VOCAB, LENGTH, ROWS, WIDTH = 64, 24, 2, 32

COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": None,
}


@dataclass(frozen=True)
class Case:
    """A transformers class with its configuration, and the same model in our vocabulary."""

    config: str
    model: str
    options: dict[str, Any]
    attention: dict[str, Any]
    moe: dict[str, Any]
    norm: dict[str, Any] = field(default_factory=dict)
    dense: dict[str, Any] | None = None
    gate: str = "mlp.gate"
    shared: str = "mlp.shared_expert"
    transposed: bool = False  # experts as [E, in, out], gate and up in turns


CASES = {
    "olmoe": Case(
        "OlmoeConfig", "OlmoeForCausalLM",
        {"num_key_value_heads": 4, "intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2},
        {"num_heads": 4, "qk_norm": "full"},
        {"num_experts": 8, "top_k": 2, "d_ff": 16},
        {"eps": 1e-5},
    ),
    "flex_olmo": Case(
        "FlexOlmoConfig", "FlexOlmoForCausalLM",
        {"num_key_value_heads": 4, "intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 3},
        {"num_heads": 4, "qk_norm": "full", "rope": {"theta": 500000}},
        {"num_experts": 8, "top_k": 3, "d_ff": 16},
        {"eps": 1e-6, "placement": "post"},
    ),
    "qwen3_moe": Case(
        "Qwen3MoeConfig", "Qwen3MoeForCausalLM",
        {"num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 48, "moe_intermediate_size": 16,
         "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True, "mlp_only_layers": [0]},
        {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "qk_norm": "per_head"},
        {"num_experts": 8, "top_k": 2, "d_ff": 16, "router": {"norm": {"kind": "sum"}}},
        dense={"d_ff": 48, "layers": [0]},
    ),
    "qwen2_moe": Case(
        "Qwen2MoeConfig", "Qwen2MoeForCausalLM",
        {"num_key_value_heads": 2, "intermediate_size": 48, "moe_intermediate_size": 16,
         "shared_expert_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 2},
        {"num_heads": 4, "num_kv_heads": 2, "qkv_bias": True},
        {"num_experts": 8, "top_k": 2, "d_ff": 16, "shared": {"num_experts": 1, "d_ff": 24, "gate": "sigmoid"}},
    ),
    "glm4_moe": Case(
        "Glm4MoeConfig", "Glm4MoeForCausalLM",
        {"num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 48, "moe_intermediate_size": 16,
         "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2,
         "first_k_dense_replace": 1, "use_qk_norm": True, "routed_scaling_factor": 1.5},
        {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "qk_norm": "per_head", "rope": {"fraction": 0.5}},
        {"num_experts": 8, "top_k": 2, "d_ff": 16, "shared": {"num_experts": 1, "d_ff": 16},
         "router": {"score": "sigmoid", "select_bias": "learned_free", "groups": {"n": 4, "keep": 2},
                    "norm": {"kind": "sum", "eps": 1e-20}, "scale": 1.5}},
        {"eps": 1e-5}, dense={"d_ff": 48, "layers": [0]}, shared="mlp.shared_experts",
    ),
    "mixtral_windowed": Case(
        "MixtralConfig", "MixtralForCausalLM",
        {"num_key_value_heads": 2, "intermediate_size": 16, "num_local_experts": 8, "num_experts_per_tok": 2,
         "sliding_window": 5, "rope_theta": 1e6},
        {"num_heads": 4, "num_kv_heads": 2, "window": {"size": 5}, "rope": {"theta": 1e6}},
        {"num_experts": 8, "top_k": 2, "d_ff": 16, "router": {"norm": {"kind": "sum"}}},
        {"eps": 1e-5},
    ),
    "gpt_oss": Case(
        "GptOssConfig", "GptOssForCausalLM",
        {"num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 16, "num_local_experts": 8,
         "num_experts_per_tok": 2, "sliding_window": 5, "swiglu_alpha": 1.5, "swiglu_limit": 0.75,
         "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0}},
        {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "qkv_bias": True, "output_bias": True,
         "window": {"size": 5, "pattern": "LG"}, "rope": {"theta": 150000}},
        {"num_experts": 8, "top_k": 2, "d_ff": 16, "expert_bias": True,
         "activation": {"kind": "swiglu_clamped", "alpha": 1.5, "limit": 0.75},
         "router": {"score": "none", "weight_from": "softmax_selected", "gate_bias": True}},
        {"eps": 1e-5}, gate="mlp.router", transposed=True,
    ),
}  # fmt: skip


def published(case: Case) -> Any:
    """The transformers model, randomly initialised, biases and norms moved off their defaults."""
    transformers = pytest.importorskip("transformers", minversion="5.24")
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    config = getattr(transformers, case.config)(**COMMON, **case.options)
    config.use_cache = False
    config._attn_implementation = "eager"
    model = getattr(transformers, case.model)(config).float()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("sinks"):
                value.fill_(-1e9)
            elif name.endswith(("norm.weight", "layernorm.weight", ".bias", "e_score_correction_bias")):
                value.add_(torch.randn_like(value) * 0.1)
            elif name.endswith("weight") or "experts" in name:
                value.copy_(torch.randn_like(value) * 0.15)
    return model


def translated(source: Callable[[str], Tensor | None], case: Case, layers: int) -> dict[str, Tensor]:
    """Our names → tensors taken from the published model's names (weights, or their gradients)."""
    found: dict[str, Tensor | None] = {
        "embedding.weight": source("model.embed_tokens.weight"),
        "head.norm.weight": source("model.norm.weight"),
        "head.weight": source("lm_head.weight"),
    }
    post = case.norm.get("placement") == "post"
    for i in range(layers):
        their, our = f"model.layers.{i}.", f"layers.{i}."
        dense = case.dense is not None and i in case.dense["layers"]
        block = "dense" if dense else "moe"
        if post:
            found[our + "attention.post_norm.weight"] = source(their + "post_attention_layernorm.weight")
            found[our + f"{block}.post_norm.weight"] = source(their + "post_feedforward_layernorm.weight")
        else:
            found[our + "attention.norm.weight"] = source(their + "input_layernorm.weight")
            found[our + f"{block}.norm.weight"] = source(their + "post_attention_layernorm.weight")
        for name in "qkv":
            found[our + f"attention.{name}.weight"] = source(their + f"self_attn.{name}_proj.weight")
            found[our + f"attention.{name}.bias"] = source(their + f"self_attn.{name}_proj.bias")
            found[our + f"attention.{name}_norm.weight"] = source(their + f"self_attn.{name}_norm.weight")
        for kind in ("weight", "bias"):
            found[our + f"attention.output.{kind}"] = source(their + f"self_attn.o_proj.{kind}")
        if dense:
            found.update(_swiglu(source, our + "dense", their + "mlp"))
            continue
        for kind in ("weight", "bias"):
            found[our + f"moe.router.{kind}"] = source(their + f"{case.gate}.{kind}")
        found[our + "moe.select_bias"] = source(their + f"{case.gate}.e_score_correction_bias")
        found.update(_experts(source, our + "moe", their + "mlp.experts", case.transposed))
        if case.moe.get("shared"):
            found.update(_swiglu(source, our + "shared", their + case.shared))
            found[our + "shared.gate.weight"] = source(their + "mlp.shared_expert_gate.weight")
    return {name: value for name, value in found.items() if value is not None}


def _experts(
    source: Callable[[str], Tensor | None], our: str, their: str, transposed: bool
) -> dict[str, Tensor | None]:
    up, down = source(f"{their}.gate_up_proj"), source(f"{their}.down_proj")
    up_bias, down_bias = source(f"{their}.gate_up_proj_bias"), source(f"{their}.down_proj_bias")
    if transposed:
        assert up is not None
        assert down is not None
        assert up_bias is not None
        up, down = torch.cat([up[..., ::2], up[..., 1::2]], -1).transpose(1, 2), down.transpose(1, 2)
        up_bias = torch.cat([up_bias[:, ::2], up_bias[:, 1::2]], -1)
    return {f"{our}.w_up": up, f"{our}.w_down": down, f"{our}.up.bias": up_bias, f"{our}.down.bias": down_bias}


def _swiglu(source: Callable[[str], Tensor | None], our: str, their: str) -> dict[str, Tensor | None]:
    gate, up = source(f"{their}.gate_proj.weight"), source(f"{their}.up_proj.weight")
    both = None if gate is None or up is None else torch.cat([gate, up])
    return {f"{our}.w_up": both, f"{our}.w_down": source(f"{their}.down_proj.weight")}


@pytest.mark.parametrize("name", CASES)
def test_a_published_architecture_gives_the_published_logits_loss_and_gradients(name: str) -> None:
    case = CASES[name]
    theirs = published(case)
    torch.manual_seed(1)
    tokens = torch.randint(0, VOCAB, (ROWS, LENGTH))
    reference = theirs(input_ids=tokens)
    labels = torch.cat([tokens[:, 1:], torch.full((ROWS, 1), -100)], 1)
    loss = torch.nn.functional.cross_entropy(reference.logits.flatten(0, 1), labels.flatten())
    loss.backward()

    model: dict[str, Any] = {
        "vocab_size": VOCAB, "d_model": WIDTH, "num_layers": 2, "max_seq_len": 64,
        "norm": {"eps": 1e-6, **case.norm}, "attention": case.attention, "moe": case.moe,
    }  # fmt: skip
    if case.dense is not None:
        model["dense"] = case.dense
    spec = small_spec(
        "precision.compute=fp32", f"train.tokens_per_step={ROWS * LENGTH}", f"data.seq_len={LENGTH}", model=model
    )
    program = compile(spec).program
    state = {**dict(theirs.named_parameters()), **dict(theirs.named_buffers())}
    values = {n: v.detach().clone() for n, v in translated(state.get, case, 2).items()}
    assert values.keys() == program.parameters.keys()

    places = torch.arange(LENGTH, dtype=torch.int32).repeat(ROWS, 1)
    batch = StepBatch(tokens, labels, places, torch.zeros_like(places), torch.arange(ROWS), ROWS * (LENGTH - 1))
    executor = Executor(program, values, CPU, "eager")
    gradients = GradientBuffers(program.trained(), torch.float32, CPU)
    computer = StepComputer(spec, executor, gradients, CPU)
    activations = executor.forward(computer.place(batch.microbatch(), batch.valid_targets))
    head = run_graph(
        program.units["head"].graphs["forward"],
        {
            **activations.entered[-1],
            **{Port("input", n): v for n, v in activations.batch.items()},
            Port("parameter", "norm.weight"): values["head.norm.weight"],
            Port("parameter", "weight"): values["head.weight"],
        },
    )
    assert relative_error(head.values["logits/mm"], reference.logits.flatten(0, 1).detach()) < 1e-5
    computed = computer.compute(batch)
    assert abs(float(computed.loss) - float(loss)) < 1e-5

    expected = translated(lambda n: state[n].grad if n in state else None, case, 2)
    assert expected.keys() == gradients.keys()
    worst = {n: relative_error(gradients[n], g) for n, g in expected.items()}
    assert max(worst.values()) < 1e-5, worst
