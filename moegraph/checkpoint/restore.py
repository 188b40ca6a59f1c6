"""From a checkpoint into the state of one rank, under whatever layout."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moegraph.checkpoint.rank_tensors import kept_tensors, whole_tensors
from moegraph.checkpoint.reader import Checkpoint
from moegraph.errors import CheckpointError
from moegraph.graph.program import Program
from moegraph.runtime.engine import Engine
from moegraph.specs.schema import Spec


@torch.no_grad()
def restore(engine: Engine, checkpoint: Checkpoint, files: Sequence[str] = ()) -> None:
    """Reads what this rank keeps, and the counters; meanwhile the hashes of `files` are compared.
    `engine.state.refresh()` has to follow, on all ranks.

    Raises CheckpointError if the checkpoint is of another model, having changed nothing, and if a file is damaged: the
    state is then not to be used.
    """
    check_same_tensors(engine.program, engine.spec, checkpoint)
    kept = kept_tensors(engine.state, engine.program, engine.mesh)
    with checkpoint.verified(files, kept) as read:
        for segment in checkpoint.in_file_order(kept):
            read(segment.tensor, segment.start, kept[segment])
    counters = checkpoint.manifest.counters
    engine.state.optimizer.steps = counters.optimizer_steps
    engine.replays = counters.replays
    if counters.capacity is not None:
        engine.start_at_capacity(counters.capacity)


def check_same_tensors(program: Program, spec: Spec, checkpoint: Checkpoint) -> None:
    """Raises CheckpointError (exit status 2) for a checkpoint whose tensors are not those of this model."""
    here, there = whole_tensors(program, spec), checkpoint.manifest.tensors
    for name in [*here, *there]:
        if here.get(name) != there.get(name):
            shown = [f"{each.dtype} {each.shape}" if each else "nothing" for each in (there.get(name), here.get(name))]
            raise CheckpointError(
                f"{checkpoint.folder}: {name} is {shown[0]} in it, and {shown[1]} in this model", exit_code=2
            )
