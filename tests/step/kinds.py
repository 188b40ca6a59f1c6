"""Small specs that between them make every kind of block the vocabulary can make, each compiled once per test run."""

from __future__ import annotations

from functools import cache

from torch import Tensor

from moegraph.compiled import Compiled, compile
from moegraph.graph.program import Port, Program, Unit
from moegraph.passes.pipeline import PassRecord
from moegraph.specs import Spec
from moegraph.verify.inputs import random_inputs
from tests.small_models import small_spec

R, A, B = "model.moe.router", "model.attention", "model.moe.balance"
SHORT = ("data.seq_len=8", "train.tokens_per_step=16")
TWO_LAYERS = ("model.num_layers=2", *SHORT)  # one dense, one of experts
ONE_LAYER = ("model.num_layers=1", "model.dense=null", *SHORT)
WITH_DENSE = ("plain", "windows", "only dense", "bf16", "full recompute")
CLAMPED = "model.moe.activation={kind: swiglu_clamped, limit: 0.5}"
SIGMOID = f"{R}={{score: sigmoid, select_bias: learned_free, groups: {{n: 4, keep: 2}}, "

CASES: dict[str, tuple[str, ...]] = {
    "plain": (),
    "bf16": ("precision.compute=bf16",),
    "fp32": ("precision.compute=fp32",),
    "windows": (f"{A}.window={{size: 3, pattern: LG}}",),
    "norm after": ("model.norm.placement=post",),
    "norm before and after": ("model.norm.placement=both",),
    "no q and k norm": (f"{A}.qk_norm=none",),
    "q and k norm over the full width": (f"{A}.qk_norm=full", "precision.compute=bf16"),
    "tied embeddings": ("model.tie_embeddings=true",),
    "biases": (f"{A}.qkv_bias=true", f"{A}.output_bias=true", f"{R}.gate_bias=true"),
    "clamped experts with biases": (CLAMPED, "model.moe.expert_bias=true"),
    "clamped experts, one bias behind them": (CLAMPED, "model.moe.output_bias=true", "precision.compute=bf16"),
    "biases in experts, weights on the input": (
        "model.moe.expert_bias=true",
        f"{R}.apply=input",
        "precision.compute=bf16",
        "passes.recompute.policy=selective",
    ),
    "no rope": (f"{A}.rope=null",),
    "interleaved half rope": (f"{A}.rope={{fraction: 0.5, interleaved: true}}",),
    "scales": ("model.embedding_scale=2.5", "model.residual_scale=0.5", "model.logit_scale=0.25"),
    "no document mask": ("data.document_mask=false",),
    "sigmoid, grouped, biased, summed": (SIGMOID + "norm: {kind: sum, eps: 1e-20}, scale: 2.5}",),
    "sigmoid, best group, clamped": (
        f"{R}={{score: sigmoid, groups: {{n: 2, keep: 1, score: max}}, norm: {{kind: sum, eps: 1e-12, mode: clamp}}}}",
    ),
    "softmax, groups filled with zero": (f"{R}={{groups: {{n: 4, keep: 2, score: max, fill: zero}}, scale: 16}}",),
    "softmax over the chosen": (f"{R}={{score: none, weight_from: softmax_selected}}",),
    "sigmoid of the chosen": (f"{R}={{score: none, weight_from: sigmoid_selected, apply: input}}",),
    "raw logits": (f"{R}={{score: none, gate_bias: true}}",),
    "weights on the input": (f"{R}.apply=input", "precision.compute=bf16"),
    "gated shared experts": ("model.moe.shared={num_experts: 2, d_ff: 8, gate: sigmoid}",),
    "no shared experts": ("model.moe.shared=null",),
    "one expert": ("model.moe.num_experts=1", "model.moe.top_k=1"),
    "one of eight": ("model.moe.top_k=1",),
    "all of eight": ("model.moe.top_k=8",),
    "one token": ("data.seq_len=1", "train.tokens_per_step=1"),
    "only dense": ("model.moe=null", "model.dense.layers=all"),
    "balance by micro-batch": (f"{B}={{over: micro_batch, coef: 0.5, f_norm: k, layers: mean}}",),
    "balance over the global batch": (f"{B}={{over: global_batch, coef: 0.5, z_coef: 0.1}}",),
    "balance pooled": (f"{B}={{over: micro_batch, layers: pooled, coef: 0.5}}", "precision.compute=bf16"),
    "only a z loss": (f"{B}={{z_coef: 0.1}}",),
    "full recompute": ("passes.recompute.policy=full",),
    "selective recompute": ("passes.recompute.policy=selective", "precision.compute=bf16"),
}


def spec_of(case: str) -> Spec:
    """The spec of a case."""
    return small_spec(*(TWO_LAYERS if case in WITH_DENSE else ONE_LAYER), *CASES[case])


@cache
def compiled_case(case: str) -> Compiled:
    """The compiled spec of a case."""
    return compile(spec_of(case))


def joint_record(case: str) -> PassRecord:
    """The record with the last joint graphs: after tracing and every step pass but the split."""
    return compiled_case(case).records[-2]


def inputs_of(program: Program, unit: Unit, seed: int = 0) -> dict[Port, Tensor]:
    """Random inputs of a unit's joint computation."""
    return random_inputs(program, unit.layer_graph, seed)
