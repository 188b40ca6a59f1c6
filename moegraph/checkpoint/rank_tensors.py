"""What of a checkpoint one rank has in memory.

Masters and moments lie in flat shards that cut parameters anywhere. As segments of whole tensors (experts by their
global index) they mean the same under every layout.
"""

from __future__ import annotations

import math

from torch import Tensor

from moegraph.checkpoint.manifest import TensorEntry
from moegraph.checkpoint.names import Kind, Segment, tensor_name
from moegraph.checkpoint.shard_writer import DTYPE_NAMES
from moegraph.graph.program import Parameter, Program
from moegraph.runtime.mesh import Mesh
from moegraph.runtime.model_state import ModelState, master_dtype
from moegraph.specs.schema import Spec


def whole_tensors(program: Program, spec: Spec) -> dict[str, TensorEntry]:
    """Every tensor of a checkpoint of this model: of each trained parameter its master and both moments, and the
    selection biases."""
    master = DTYPE_NAMES[master_dtype(spec)]
    moments = "BF16" if spec.train.optimizer.moments == "bf16" else master
    found: dict[str, TensorEntry] = {}
    for parameter in program.parameters.values():
        kinds: dict[Kind, str] = {}
        if parameter.trained:
            kinds = {"master": master, "exp_avg": moments, "exp_avg_sq": moments}
        elif parameter.role == "select_bias":
            kinds = {"buffer": DTYPE_NAMES[parameter.dtype]}
        for kind, dtype in kinds.items():
            entry = {"shape": list(parameter.global_shape), "dtype": dtype}
            found[tensor_name(kind, parameter.name)] = TensorEntry.model_validate(entry)
    return found


def kept_tensors(state: ModelState, program: Program, mesh: Mesh) -> dict[Segment, Tensor]:
    """What this rank keeps, as one-dimensional views: writing into them changes the state. `ModelState.refresh` then
    has to be called."""
    found: dict[Segment, Tensor] = {}
    optimizer = state.optimizer
    every: dict[Kind, dict[str, Tensor]] = {
        "master": dict(optimizer.masters),
        "exp_avg": dict(optimizer.exp_avg),
        "exp_avg_sq": dict(optimizer.exp_avg_sq),
    }
    for kind, tensors in every.items():
        for name, tensor in tensors.items():
            piece = state.piece(name)
            assert piece is not None, name
            offset = _first_element(program.parameters[name], mesh)
            segment = Segment(tensor_name(kind, name), offset + piece.start, offset + piece.stop)
            found[segment] = tensor.view(-1)
    for name, value in state.values.items():
        if program.parameters[name].role == "select_bias":
            found[Segment(tensor_name("buffer", name), 0, value.numel())] = value.view(-1)
    return found


def owned_tensors(state: ModelState, program: Program, mesh: Mesh) -> dict[Segment, Tensor]:
    """What this rank writes: every element of the checkpoint is owned by one rank. Selection biases are equal on all
    replicas, and the first one's."""
    kept = kept_tensors(state, program, mesh)
    first = mesh.dp_rank == 0
    return {segment: each for segment, each in kept.items() if first or not segment.tensor.startswith("buffer.")}


def _first_element(parameter: Parameter, mesh: Mesh) -> int:
    """Where what this rank holds of a parameter begins in the whole of it, flattened."""
    return mesh.ep_rank * math.prod(parameter.shape) if parameter.shards > 1 else 0
