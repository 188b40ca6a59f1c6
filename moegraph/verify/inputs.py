"""Random inputs for one kind of block: what its joint computation takes, drawn from a seed.

Tokens and labels are in range (some labels ignored), rows hold two documents and end in padding, norms and biases are
moved off their initial values so that nothing hides behind a one or a zero. Ranks have the same weights and other
tokens; weights of experts are drawn whole, and `local_inputs` gives a rank its part.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, fx

from moegraph.graph.program import Port, Program, Unit
from moegraph.specs.schema import Spec
from moegraph.step.joint import input_values, joint_signature


def random_inputs(program: Program, layer: fx.GraphModule, seed: int, rank: int = 0) -> dict[Port, Tensor]:
    """A value for every input of the block's joint computation on one rank, tangents included. Weights have their shape
    in the whole model."""
    weights = torch.Generator().manual_seed(seed)
    generator = weights if rank == 0 else torch.Generator().manual_seed((seed + rank) % 2**63)
    values = input_values(layer)
    found: dict[Port, Tensor] = {}
    for port in joint_signature(layer).inputs:
        shape, dtype = tuple(values[port].shape), values[port].dtype
        if port.role == "input" and port.name != "hidden":
            found[port] = _batch_field(program.spec, port.name, shape, dtype, generator)
        elif port.role in ("parameter", "buffer"):
            parameter = layer.meta["parameters"][port.name]
            shape = parameter.global_shape
            noise = torch.randn(shape, generator=weights, dtype=torch.float64)
            base = 1.0 if parameter.init == "ones" else 0.0
            width = max(parameter.std, 0.1) if len(shape) < 2 else max(parameter.std, shape[-1] ** -0.5)
            found[port] = (base + width * noise).to(dtype)
        else:
            found[port] = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return found


def local_inputs(inputs: Mapping[Port, Tensor], unit: Unit, rank: int) -> dict[Port, Tensor]:
    """The inputs as one rank holds them: of parameters that are spread over ranks, its part."""
    parameters = unit.layer_graph.meta["parameters"]
    found = dict(inputs)
    for port, value in inputs.items():
        if port.role in ("parameter", "buffer") and parameters[port.name].shards > 1:
            found[port] = value.chunk(parameters[port.name].shards)[rank].clone()
    return found


def _batch_field(
    spec: Spec, name: str, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
) -> Tensor:
    if name in ("tokens", "labels"):
        ids = torch.randint(0, spec.model.vocab_size, shape, generator=generator)
        if name == "labels":
            ids[torch.rand(shape, generator=generator) < 0.125] = -100
        return ids
    if name == "inverse_targets":
        return torch.tensor(1.0 / 17, dtype=dtype)
    sequences, seq_len = shape
    places = torch.arange(seq_len).expand(sequences, seq_len)
    boundary, end = max(seq_len // 3, 1), max(seq_len - seq_len // 8, 1)
    if name == "positions":
        return torch.where(places < boundary, places, places - boundary).to(dtype).contiguous()
    documents = (places >= boundary).long().masked_fill(places >= end, -1)
    return documents.to(dtype).contiguous()
