"""Lowering of the attention sub-layer: projections, q/k norm, rotary embedding, attention, output projection."""

from __future__ import annotations

from torch import fx

from moegraph import ops
from moegraph.lowering.context import Lowering


def lower_attention(
    lowering: Lowering, x: fx.Node, positions: fx.Node, document_ids: fx.Node, window: int | None
) -> fx.Node:
    """x [T, D] → [T, D]."""
    model, call = lowering.spec.model, lowering.builder.call
    attention, head_dim = model.attention, model.head_dim
    widths = {"q": attention.num_heads, "k": model.num_kv_heads, "v": model.num_kv_heads}
    heads: dict[str, fx.Node] = {}
    for name, count in widths.items():
        heads[name] = _project(lowering, name, x, count)
    if attention.rope is not None:
        rope = attention.rope
        rotary_dim = round(head_dim * rope.fraction)
        for name in ("q", "k"):
            heads[name] = call(
                f"attention.{name}_rope",
                ops.rope,
                heads[name],
                positions,
                theta=rope.theta,
                rotary_dim=rotary_dim,
                interleaved=rope.interleaved,
            )
    documents = document_ids if lowering.spec.data.document_mask else None
    core = call(
        "attention.core",
        ops.attention,
        heads["q"],
        heads["k"],
        heads["v"],
        documents,
        window=window,
        scale=head_dim**-0.5,
    )
    out = lowering.builder.result("attention.context", core, 0)
    merged = call("attention.merge_heads", ops.merge_heads, out)
    weight = lowering.weight(
        "attention.output.weight", model.d_model, attention.num_heads * head_dim, into_residual=True
    )
    bias = lowering.bias("attention.output.bias", model.d_model) if attention.output_bias else None
    return call("attention.output", ops.linear, merged, weight, bias)


def _project(lowering: Lowering, name: str, x: fx.Node, num_heads: int) -> fx.Node:
    """One of q, k, v: x [T, D] → [B, S, num_heads, head_dim], normalised where the spec says so."""
    model, call = lowering.spec.model, lowering.builder.call
    width = num_heads * model.head_dim
    weight = lowering.weight(f"attention.{name}.weight", width, model.d_model)
    bias = lowering.bias(f"attention.{name}.bias", width) if model.attention.qkv_bias else None
    flat = call(f"attention.{name}", ops.linear, x, weight, bias)
    normed = model.attention.qk_norm if name != "v" else "none"
    if normed == "full":
        flat = lowering.norm(f"attention.{name}_norm", flat, width)
    split = call(f"attention.{name}_heads", ops.split_heads, flat, lowering.sequences, lowering.seq_len, num_heads)
    return lowering.norm(f"attention.{name}_norm", split, model.head_dim) if normed == "per_head" else split
