"""Lowering: a spec becomes a program of blocks, straight from the spec and on fake tensors.

One graph is built per kind of block however many layers there are, so a model of trillions of parameters lowers in
seconds on a laptop.
"""

from __future__ import annotations

from torch import fx

from moegraph.graph.program import Instance, Program, Unit, declared_parameters
from moegraph.lowering.blocks import lower_embedding, lower_head, lower_layer
from moegraph.specs.schema import Spec


def lower(spec: Spec) -> Program:
    """The program of a spec before any pass: embedding, `model.num_layers` layers, head."""
    units: dict[str, Unit] = {}
    instances: list[Instance] = []

    def place(prefix: str, kind: str, module: fx.GraphModule | None, layer: int | None, **options: str) -> None:
        if module is not None:
            units[kind] = Unit(kind, {"layer": module}, options)
        local = units[kind].graphs["layer"].meta["parameters"]
        names = {name: f"{prefix}.{name}" for name in local}
        if prefix == "head" and spec.model.tie_embeddings:
            names["weight"] = "embedding.weight"
        instances.append(Instance(prefix, kind, names, layer))

    place("embedding", "embedding", lower_embedding(spec), None)
    for layer in range(spec.model.num_layers):
        kind, dense, window, recompute = _layer_kind(spec, layer)
        module = None if kind in units else lower_layer(spec, kind, dense=dense, window=window)
        place(f"layers.{layer}", kind, module, layer, recompute=recompute)
    place("head", "head", lower_head(spec), None)
    return Program(spec, units, tuple(instances), declared_parameters(units, instances))


def _layer_kind(spec: Spec, layer: int) -> tuple[str, bool, int | None, str]:
    """The kind's name and what it is made from: whatever differs between layers is in the name."""
    dense, window, recompute = spec.model.is_dense(layer), spec.model.window(layer), spec.passes.recompute
    name = "dense" if dense else "moe"
    if window is not None:
        name += f".window_{window}"
    policy = recompute.policy if recompute.layers == "all" or layer in recompute.layers else "none"
    if policy != "none":
        name += f".recompute_{policy}"
    return name, dense, window, policy
