"""Lowering of whole blocks: embedding, a layer of any kind, and the head with its loss."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from moegraph import ops
from moegraph.graph.build import GraphBuilder
from moegraph.lowering.attention import lower_attention
from moegraph.lowering.context import Lowering, compute_dtype, high_dtype
from moegraph.lowering.feed_forward import lower_dense, lower_moe
from moegraph.specs.schema import Spec

PASS_NAME = "lower"


def lower_embedding(spec: Spec) -> fx.GraphModule:
    """tokens [T] → hidden [T, D]."""
    lowering = Lowering(spec, GraphBuilder(PASS_NAME))
    builder, model = lowering.builder, spec.model
    tokens = builder.input("tokens", (lowering.tokens,), torch.int64)
    table = lowering.weight("weight", model.vocab_size, model.d_model, role="embedding")
    hidden = builder.call("lookup", ops.embedding, tokens, table)
    hidden = builder.call("scaled", ops.scale, hidden, model.embedding_scale)
    builder.output("hidden", "hidden", hidden)
    return builder.finish("embedding")


def lower_layer(spec: Spec, kind: str, *, dense: bool, window: int | None) -> fx.GraphModule:
    """hidden [T, D] → hidden [T, D]: attention, then a dense or mixture-of-experts feed-forward."""
    lowering = Lowering(spec, GraphBuilder(PASS_NAME))
    builder, shape = lowering.builder, (lowering.sequences, lowering.seq_len)
    hidden = builder.input("hidden", (lowering.tokens, spec.model.d_model), compute_dtype(spec))
    positions = builder.input("positions", shape, torch.int32)
    document_ids = builder.input("document_ids", shape, torch.int32)
    hidden = _residual(
        lowering, "attention", hidden, lambda x: lower_attention(lowering, x, positions, document_ids, window)
    )
    if dense:
        hidden = _residual(lowering, "dense", hidden, lambda x: lower_dense(lowering, x))
    else:
        mask = builder.call("token_mask", ops.token_mask, document_ids) if spec.data.document_mask else None
        hidden = _residual(lowering, "moe", hidden, lambda x: lower_moe(lowering, x, mask))
    builder.output("hidden", "hidden", hidden)
    return builder.finish(kind)


def _residual(lowering: Lowering, name: str, hidden: fx.Node, sublayer: Callable[[fx.Node], fx.Node]) -> fx.Node:
    """hidden + scale · sublayer, with the norm before it, after it, or both."""
    model = lowering.spec.model
    x = hidden
    if model.norm.placement in ("pre", "both"):
        x = lowering.norm(f"{name}.norm", x, model.d_model)
    x = sublayer(x)
    if model.norm.placement in ("post", "both"):
        x = lowering.norm(f"{name}.post_norm", x, model.d_model)
    return lowering.builder.call(f"{name}.residual", ops.add, hidden, x, alpha=model.residual_scale)


def lower_head(spec: Spec) -> fx.GraphModule:
    """hidden [T, D], labels [T], inverse_targets 0-d → loss 0-d = inverse_targets · Σ cross entropy.

    `inverse_targets` is 1 / (valid targets of the global batch), so that the losses of all micro-batches and ranks
    add up to the mean.
    """
    lowering = Lowering(spec, GraphBuilder(PASS_NAME))
    builder, model = lowering.builder, spec.model
    hidden = builder.input("hidden", (lowering.tokens, model.d_model), compute_dtype(spec))
    labels = builder.input("labels", (lowering.tokens,), torch.int64)
    inverse_targets = builder.input("inverse_targets", (), high_dtype(spec))
    normed = lowering.norm("norm", hidden, model.d_model)
    weight = lowering.weight("weight", model.vocab_size, model.d_model, role="embedding")
    logits = builder.call("logits", ops.linear, normed, weight, None)
    logits = builder.call("scaled_logits", ops.scale, logits, model.logit_scale)
    entropy = builder.call("cross_entropy", ops.cross_entropy, logits, labels)
    per_token = builder.result("token_loss", entropy, 0)
    loss = builder.call("loss", ops.scaled_sum, per_token, inverse_targets)
    builder.output("loss", "loss", loss)
    return builder.finish("head")
