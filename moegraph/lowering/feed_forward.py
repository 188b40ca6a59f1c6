"""Lowering of the feed-forward sub-layer: an ordinary SwiGLU, or routed and shared experts."""

from __future__ import annotations

from torch import fx

from moegraph import ops
from moegraph.graph.program import Parameter
from moegraph.lowering.context import Lowering, high_dtype


def lower_dense(lowering: Lowering, x: fx.Node) -> fx.Node:
    """x [T, D] → [T, D] through one SwiGLU."""
    dense = lowering.spec.model.dense
    assert dense is not None
    return _swiglu(lowering, "dense", x, dense.d_ff)


def _swiglu(lowering: Lowering, name: str, x: fx.Node, d_ff: int) -> fx.Node:
    d_model, call = lowering.spec.model.d_model, lowering.builder.call
    up = call(f"{name}.up", ops.linear, x, lowering.weight(f"{name}.w_up", 2 * d_ff, d_model), None)
    act = call(f"{name}.act", ops.swiglu, up)
    down = lowering.weight(f"{name}.w_down", d_model, d_ff, into_residual=True)
    return call(f"{name}.down", ops.linear, act, down, None)


def lower_moe(lowering: Lowering, x: fx.Node, token_mask: fx.Node | None) -> fx.Node:
    """x [T, D] → [T, D]: route, permute into expert order, the experts, combine.

    Declares the metrics `expert_counts` [E], `probability_sum` [E] and `router_entropy` 0-d, over unmasked tokens.
    """
    moe, call, result = lowering.spec.model.moe, lowering.builder.call, lowering.builder.result
    assert moe is not None
    d_model, experts = lowering.spec.model.d_model, moe.num_experts
    logits, weights, ids = _route(lowering, x)
    sort = call("moe.sort", ops.sort_by_expert, ids, experts)
    order, inverse, offsets = (result(f"moe.{n}", sort, i) for i, n in enumerate(("order", "inverse", "offsets")))
    rows = call("moe.rows", ops.permute, x, order, inverse, offsets, top_k=moe.top_k)
    row_weight = call("moe.row_weight", ops.gather_weights, weights, order, inverse, offsets)
    if moe.router.apply == "input":
        rows = call("moe.weighted", ops.scale_rows, rows, row_weight)
    down = _experts(lowering, rows, offsets)
    if moe.router.apply == "output":
        down = call("moe.weighted", ops.scale_rows, down, row_weight)
    out = call("moe.combine", ops.combine, down, order, inverse, offsets, top_k=moe.top_k)
    if moe.output_bias:
        out = call("moe.output", ops.add_bias, out, lowering.bias("moe.output.bias", d_model))
    if moe.shared is not None:
        out = call("moe.sum", ops.add, out, _shared(lowering, x))
    _metrics(lowering, logits, ids, token_mask)
    return out


def _experts(lowering: Lowering, rows: fx.Node, offsets: fx.Node) -> fx.Node:
    """rows [R, D] sorted by expert → [R, D]: two grouped products around a gated activation, biases where wanted."""
    moe, call = lowering.spec.model.moe, lowering.builder.call
    assert moe is not None
    d_model, experts = lowering.spec.model.d_model, moe.num_experts

    def product(name: str, x: fx.Node, weight: fx.Node, width: int) -> fx.Node:
        out = call(f"moe.{name}", ops.grouped_mm, x, weight, offsets)
        if not moe.expert_bias:
            return out
        bias = lowering.expert_bias(f"moe.{name}.bias", experts, width)
        return call(f"moe.{name}_biased", ops.add_expert_bias, out, bias, offsets)

    w_up = lowering.weight("moe.w_up", experts, 2 * moe.d_ff, d_model, role="expert")
    up = product("up", rows, w_up, 2 * moe.d_ff)
    if moe.activation == "swiglu":
        act = call("moe.act", ops.swiglu, up)
    else:
        clamp = moe.activation
        act = call("moe.act", ops.swiglu_clamped, up, alpha=clamp.alpha, limit=clamp.limit)
    w_down = lowering.weight("moe.w_down", experts, d_model, moe.d_ff, role="expert", into_residual=True)
    return product("down", act, w_down, d_model)


def _route(lowering: Lowering, x: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node]:
    """Router logits [T, E], weights [T, K] and ids [T, K]."""
    moe, builder = lowering.spec.model.moe, lowering.builder
    assert moe is not None
    router = moe.router
    gate = lowering.weight("moe.router.weight", moe.num_experts, lowering.spec.model.d_model, role="router")
    gate_bias = lowering.bias("moe.router.bias", moe.num_experts, router=True) if router.gate_bias else None
    logits = builder.call("moe.router", ops.router_logits, x, gate, gate_bias)
    select_bias = None
    if router.select_bias == "learned_free":
        dtype = high_dtype(lowering.spec)
        buffer = Parameter("moe.select_bias", (moe.num_experts,), "select_bias", "zeros", trained=False, dtype=dtype)
        select_bias = builder.parameter(buffer)
    groups = router.groups
    route = builder.call(
        "moe.route",
        ops.route,
        logits,
        select_bias,
        score=router.score,
        top_k=moe.top_k,
        groups=None if groups is None else (groups.n, groups.keep, groups.score, groups.fill),
        weight_from=router.weight_from,
        norm_kind=router.norm.kind,
        norm_eps=router.norm.eps,
        norm_mode=router.norm.mode,
        scale=router.scale,
    )
    return logits, builder.result("moe.weights", route, 0), builder.result("moe.ids", route, 1)


def _shared(lowering: Lowering, x: fx.Node) -> fx.Node:
    moe, call = lowering.spec.model.moe, lowering.builder.call
    assert moe is not None
    assert moe.shared is not None
    shared = moe.shared
    out = _swiglu(lowering, "shared", x, shared.num_experts * (shared.d_ff or moe.d_ff))
    if shared.gate == "sigmoid":
        weight = lowering.weight("shared.gate.weight", 1, lowering.spec.model.d_model)
        gate = call("shared.gate", ops.linear, x, weight, None)
        out = call("shared.gated", ops.sigmoid_gate, out, gate)
    return out


def _metrics(lowering: Lowering, logits: fx.Node, ids: fx.Node, token_mask: fx.Node | None) -> None:
    moe, builder = lowering.spec.model.moe, lowering.builder
    assert moe is not None
    score = moe.router.score
    counts = builder.call("moe.expert_counts", ops.expert_counts, ids, token_mask, moe.num_experts)
    builder.output("metric", "expert_counts", counts)
    sums = builder.call("moe.probability_sum", ops.probability_sum, logits, token_mask, score=score)
    builder.output("metric", "probability_sum", sums)
    entropy = builder.call("moe.router_entropy", ops.router_entropy, logits, token_mask, score=score)
    builder.output("metric", "router_entropy", entropy)
