"""Every architecture of the list that moegraph adopts can be said; what cannot run yet is refused by its own names.

Each entry is the difference from a small model, and the paths that wait for later work (empty: it loads).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from moegraph.specs import load_spec
from tests.specs.small import MINIMAL, problems_of, write

R = "model.moe.router"
A = "model.attention"
V3_NORM = "norm: {kind: sum, eps: 1e-20}"
V3_ROUTER = f"{R}={{score: sigmoid, select_bias: learned_free, groups: {{n: 4, keep: 2}}, {V3_NORM}, scale: 2.5}}"
DELTA_NET = "{num_key_heads: 2, num_value_heads: 4, key_head_dim: 8, value_head_dim: 8}"
LOCAL = "{size: 64, pattern: LLLG}"
LONGROPE = "{kind: longrope, original_max_seq_len: 4096, short_factor: [1, 1], long_factor: [1, 2]}"
LLAMA3 = "{kind: llama3, factor: 8, original_max_seq_len: 8192}"
MLA = f"{A}.mla={{q_lora_rank: 16, kv_lora_rank: 8, qk_nope_head_dim: 8, qk_rope_head_dim: 4, v_head_dim: 8}}"
YARN = "{kind: yarn, factor: 40, original_max_seq_len: 4096, mscale: 0.7, mscale_all_dim: 0.7, truncate: false}"
SHARED = "model.moe.shared={num_experts: 1, d_ff: 16}"
GATED = "model.moe.shared={num_experts: 1, d_ff: 16, gate: sigmoid}"
RENORM = f"{R}.norm.kind=sum"
ARCHITECTURES: dict[str, tuple[list[str], list[str]]] = {
    "OlmoeForCausalLM": (
        ["model.norm.eps=1e-5", f"{A}.qk_norm=full", "model.moe.balance={coef: 0.01, layers: pooled, f_norm: k}"],
        [],
    ),
    "OlmoeForCausalLM, clipped": ([f"{A}.clip_qkv=8"], [f"{A}.clip_qkv"]),
    "FlexOlmoForCausalLM": (
        ["model.norm.placement=post", f"{A}.qk_norm=full", f"{A}.rope.theta=5e5", "model.moe.top_k=5"],
        [],
    ),
    "Qwen3MoeForCausalLM": (
        [f"{A}.qk_norm=per_head", f"{A}.head_dim=16", RENORM, "model.dense={d_ff: 64, layers: [1, 3]}"],
        [],
    ),
    "Qwen2MoeForCausalLM": ([GATED, f"{A}.qkv_bias=true"], []),
    "Qwen3NextForCausalLM": (
        [
            GATED,
            RENORM,
            f"{A}.output_gate=true",
            f"{A}.rope.fraction=0.25",
            f"model.mixers={{pattern: DDDA, gated_delta_net: {DELTA_NET}}}",
        ],
        [f"{A}.output_gate", "model.mixers"],
    ),
    "MixtralForCausalLM": ([RENORM, f"{A}.rope.theta=1e6", f"{A}.window.size=64"], []),
    "MixtralForCausalLM, jitter": ([f"{R}.jitter=0.01"], [f"{R}.jitter"]),
    "DeepseekV2ForCausalLM": (
        [
            MLA,
            f"{A}.rope.scaling={YARN}",
            f"{R}={{groups: {{n: 4, keep: 2, score: max, fill: zero}}, scale: 16}}",
            SHARED,
        ],
        [f"{A}.mla", f"{A}.rope.scaling"],
    ),
    "DeepseekV3ForCausalLM": (
        [
            MLA,
            V3_ROUTER,
            f"{A}.rope.interleaved=true",
            "model.multi_token_prediction.depth=1",
            "model.dense={d_ff: 64, layers: [0]}",
        ],
        [f"{A}.mla", "model.multi_token_prediction"],
    ),
    "Glm4MoeForCausalLM": (
        [V3_ROUTER, f"{A}={{qk_norm: per_head, qkv_bias: true, rope: {{fraction: 0.5}}}}", SHARED],
        [],
    ),
    "Dots1ForCausalLM": (
        [f"{R}={{score: sigmoid, select_bias: learned_free, scale: 2.5}}", f"{A}.qk_norm=per_head", SHARED],
        [],
    ),
    "GptOssForCausalLM": (
        [
            f"{R}={{score: none, gate_bias: true, weight_from: softmax_selected}}",
            "model.moe.activation={kind: swiglu_clamped, alpha: 1.702, limit: 7}",
            "model.moe.expert_bias=true",
            f"{A}={{sinks: true, qkv_bias: true, output_bias: true, window: {{size: 128, pattern: LG}}}}",
            f"{A}.rope={{theta: 150000, scaling: {YARN}}}",
        ],
        [f"{A}.sinks", f"{A}.rope.scaling"],
    ),
    "GraniteMoeSharedForCausalLM": (
        [
            f"{R}={{score: none, weight_from: softmax_selected}}",
            "model.embedding_scale=12",
            "model.residual_scale=0.22",
            "model.logit_scale=0.125",
            f"{A}.scale=0.0078125",
            "model.tie_embeddings=true",
            SHARED,
        ],
        [f"{A}.scale"],
    ),
    "MiniMaxM2ForCausalLM": (
        [
            f"{R}={{score: sigmoid, select_bias: learned_free, norm: {{kind: sum}}}}",
            f"{A}={{qk_norm: full, rope: {{fraction: 0.5}}}}",
        ],
        [],
    ),
    "Ernie4_5_MoeForCausalLM": (
        [
            f"{R}={{select_bias: learned_free, norm: {{kind: sum, eps: 1e-12, mode: clamp}}}}",
            "model.tie_embeddings=true",
            SHARED,
        ],
        [],
    ),
    "AfmoeForCausalLM": (
        [
            f"{R}={{score: sigmoid, select_bias: learned_free, norm: {{kind: sum, eps: 1e-20}}, scale: 2.8}}",
            f"{A}={{output_gate: true, qk_norm: per_head, window: {LOCAL}, rope: {{pattern: RRRN}}}}",
            "model.norm.placement=both",
            "model.embedding_scale=5.6568542",
        ],
        [f"{A}.output_gate", f"{A}.rope.pattern"],
    ),
    "Lfm2MoeForCausalLM": (
        [
            f"{R}={{score: sigmoid, select_bias: learned_free, norm: {{kind: sum, eps: 1e-6}}}}",
            "model.mixers={pattern: CCA, short_conv: {kernel: 3}}",
            "model.dense={d_ff: 64, layers: [0, 1]}",
        ],
        ["model.mixers"],
    ),
    "Llama4ForCausalLM": (
        [
            "model.moe.top_k=1",
            f"{R}={{score: none, weight_from: sigmoid_selected, apply: input}}",
            f"{A}={{qk_norm: l2, qk_norm_after_rope: true, chunk: {LOCAL}, temperature: {{floor: 8192}}}}",
            f"{A}.rope={{interleaved: true, pattern: RRRN, scaling: {LLAMA3}}}",
            SHARED,
        ],
        [
            f"{A}.qk_norm",
            f"{A}.qk_norm_after_rope",
            f"{A}.chunk",
            f"{A}.temperature",
            f"{A}.rope.pattern",
            f"{A}.rope.scaling",
        ],
    ),
    "PhimoeForCausalLM": (
        [
            f"{R}={{algorithm: sparsemixer, jitter: 0.01}}",
            "model.norm={kind: layer, bias: true, eps: 1e-5}",
            f"{A}={{qkv_bias: true, output_bias: true}}",
            f"{A}.rope.scaling={LONGROPE}",
            "model.head_bias=true",
        ],
        ["model.norm.kind", "model.norm.bias", f"{A}.rope.scaling", f"{R}.algorithm", f"{R}.jitter", "model.head_bias"],
    ),
    "JetMoeForCausalLM": (
        [
            f"{R}={{score: none, weight_from: softmax_selected}}",
            f"{A}.experts={{num_experts: 8, top_k: 2}}",
            "model.moe.output_bias=true",
        ],
        [f"{A}.experts"],
    ),
    "HunYuanMoEV1ForCausalLM": (
        [RENORM, SHARED, f"{A}={{qk_norm: per_head, qk_norm_after_rope: true}}"],
        [f"{A}.qk_norm_after_rope"],
    ),
    "ExaoneMoeForCausalLM": (
        [V3_ROUTER, SHARED, f"{A}={{qk_norm: per_head, window: {LOCAL}, rope: {{pattern: RRRN}}}}"],
        [f"{A}.rope.pattern"],
    ),
    "Olmo2ForCausalLM": (
        ["model.moe=null", "model.dense.d_ff=64", "model.norm.placement=post", f"{A}.qk_norm=full"],
        [],
    ),
    "Olmo3ForCausalLM": (
        [
            "model.moe=null",
            "model.dense.d_ff=64",
            "model.norm.placement=post",
            f"{A}={{qk_norm: full, window: {{size: 64, pattern: LLLG, rope: {{theta: 500000}}}}}}",
            f"{A}.rope={{theta: 500000, scaling: {YARN}}}",
        ],
        [f"{A}.window.rope", f"{A}.rope.scaling"],
    ),
    "Qwen3ForCausalLM": (
        ["model.moe=null", "model.dense.d_ff=64", f"{A}={{qk_norm: per_head, head_dim: 16, num_kv_heads: 2}}"],
        [],
    ),
    "LlamaForCausalLM": (["model.moe=null", "model.dense={d_ff: 64, layers: all}", f"{A}.num_kv_heads=2"], []),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_can_be_said(tmp_path: Path, name: str) -> None:
    overrides, waiting = ARCHITECTURES[name]
    source = write(tmp_path, MINIMAL)
    if not waiting:
        load_spec(source, overrides)
        return
    problems = problems_of(source, overrides)
    assert {each.code for each in problems} == {"MG107"}, problems
    assert sorted(each.path for each in problems) == sorted(waiting)
