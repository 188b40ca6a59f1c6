"""The `model.moe` section: experts, router, shared experts and balance losses."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from moegraph.specs.schema.base import Count, Fraction, NonNegative, Positive, Section, Width


class RouterNorm(Section):
    """Renormalisation of the chosen weights: w / (Σw + eps), or w / max(Σw, eps) with `mode: clamp`."""

    kind: Literal["none", "sum"] = "none"
    eps: Fraction = 0.0
    mode: Literal["add", "clamp"] = "add"


class RouterGroups(Section):
    """Group-limited choice: only experts of the `keep` best of `n` groups can be chosen (arXiv 2405.04434)."""

    n: Count
    keep: Count
    score: Literal["top2_sum", "max"] = "top2_sum"
    fill: Literal["-inf", "zero"] = "-inf"


class Router(Section):
    """How a token chooses experts, and with which weight their outputs are added.

    `score` turns logits into scores; `select_bias: learned_free` adds a bias that only selection sees, moved after
    each step by `bias_update_rate · sign(mean load - load)` (arXiv 2408.15664); `weight_from` says what the weights
    are taken from; `apply: input` multiplies the expert's input instead of its output. `algorithm: sparsemixer`
    samples the experts one after another (arXiv 2310.00811); `jitter` multiplies the router's and the experts' input
    by uniform noise within 1 ± jitter in training.
    """

    algorithm: Literal["top_k", "sparsemixer"] = "top_k"
    jitter: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    score: Literal["softmax", "sigmoid", "none"] = "softmax"
    gate_dtype: Literal["fp32"] = "fp32"
    gate_bias: bool = False
    select_bias: Literal["none", "learned_free"] = "none"
    bias_update_rate: Annotated[float, Field(gt=0.0, le=1.0)] = 1e-3
    groups: RouterGroups | None = None
    weight_from: Literal["score", "softmax_selected", "sigmoid_selected"] = "score"
    norm: RouterNorm = Field(default_factory=RouterNorm)
    scale: Annotated[float, Field(gt=0.0, le=1e4)] = 1.0
    apply: Literal["output", "input"] = "output"


class SharedExperts(Section):
    """Experts that every token visits, as one SwiGLU of width num_experts · d_ff; `gate: sigmoid` weighs their sum."""

    num_experts: Count = 1
    d_ff: Width | None = None
    gate: Literal["none", "sigmoid"] = "none"


class Balance(Section):
    """Auxiliary losses on the router.

    `definition: switch` is num_experts · Σ_e f_e · P_e (arXiv 2101.03961): f the share of the choices that fell on
    expert e (summing to 1, or to top_k with `f_norm: k`), P the mean normalised score. `over` is the set of tokens a
    mean is taken over, `layers` how the layers' losses become one. z loss: mean of logsumexp(logits)² (arXiv
    2202.08906).
    """

    definition: Literal["switch"] = "switch"
    over: Literal["micro_batch", "sequence", "global_batch"] = "micro_batch"
    layers: Literal["sum", "mean", "pooled"] = "sum"
    f_norm: Literal[1, "k"] = 1
    coef: NonNegative = 0.0
    z_coef: NonNegative = 0.0


class SwigluClamped(Section):
    """The gpt-oss activation (arXiv 2508.10925): (up + 1) · gate · sigmoid(alpha · gate), with the gate clamped from
    above at `limit` and up clamped to ± `limit`."""

    kind: Literal["swiglu_clamped"]
    alpha: Positive = 1.702
    limit: Positive = 7.0


class Moe(Section):
    """A layer of `num_experts` experts of width `d_ff`, of which each token visits `top_k`.

    `activation` is SwiGLU or its clamped variant (shared experts and dense layers are always SwiGLU); `expert_bias`
    gives each expert a bias on its up and its down projection; `output_bias` adds one bias to what the experts of a
    token sum up to.
    """

    num_experts: Annotated[int, Field(ge=1, le=2**16)]
    top_k: Annotated[int, Field(ge=1, le=2**10)]
    d_ff: Width
    activation: Literal["swiglu"] | SwigluClamped = "swiglu"
    expert_bias: bool = False
    output_bias: bool = False
    router: Router = Field(default_factory=Router)
    shared: SharedExperts | None = None
    balance: Balance = Field(default_factory=Balance)
