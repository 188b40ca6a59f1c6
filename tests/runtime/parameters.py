"""A small model's parameters, as lowering would declare them."""

from __future__ import annotations

from moegraph.graph.program import Parameter


def parameters(layers: int = 2, experts: int = 4, d_model: int = 8, d_ff: int = 6) -> dict[str, Parameter]:
    """Embedding, attention output, router, experts, norms, a select bias and a head."""
    found = [Parameter("embedding.weight", (16, d_model), "embedding", "normal", 0.02)]
    for i in range(layers):
        found += [
            Parameter(f"layers.{i}.attention.norm.weight", (d_model,), "norm", "ones"),
            Parameter(f"layers.{i}.attention.q.weight", (d_model, d_model), "matrix", "normal", 0.02),
            Parameter(f"layers.{i}.attention.q.bias", (d_model,), "bias", "zeros"),
            Parameter(f"layers.{i}.moe.router.weight", (experts, d_model), "router", "normal", 0.02),
            Parameter(f"layers.{i}.moe.select_bias", (experts,), "select_bias", "zeros", trained=False),
            Parameter(f"layers.{i}.moe.w_up", (experts, 2 * d_ff, d_model), "expert", "normal", 0.02),
            Parameter(f"layers.{i}.moe.w_down", (experts, d_model, d_ff), "expert", "normal", 0.01),
        ]
    found.append(Parameter("head.weight", (16, d_model), "embedding", "normal", 0.02))
    return {parameter.name: parameter for parameter in found}
