"""Parameters and floating-point operations of a model.

Conventions: a multiply and an add are two operations. Only matrix products count (`moegraph.ops.flops`): projections,
experts that a token visits, shared experts, the router, the head, and attention over the keys its causal mask and
window keep; the embedding is a lookup and costs nothing. Training is three times the forward. Recomputation is not
counted: it is time, not work, so that utilisation compares between policies.

Active parameters are those that one token meets: everything but the experts it does not visit. A tied embedding counts
once.
"""

from __future__ import annotations

from moegraph.graph.cost import forward_flops
from moegraph.graph.program import Program
from moegraph.specs.schema import Spec

TRAINING_FACTOR = 3  # forward, and a backward that is two products for each of its own


def count_parameters(program: Program) -> tuple[int, int]:
    """(total, active) trained parameters of the whole model."""
    moe = program.spec.model.moe
    total = active = 0
    for parameter in program.trained():
        total += parameter.numel
        if parameter.experts:
            assert moe is not None
            experts = parameter.global_shape[0]
            active += parameter.numel // experts * min(moe.top_k, experts)
        else:
            active += parameter.numel
    return total, active


def flops_per_token(spec: Spec, program: Program) -> float:
    """Training operations per token at `data.seq_len`."""
    tokens = spec.sequences_per_microbatch * spec.data.seq_len
    forward = {kind: forward_flops(program, kind) for kind in program.units}
    return TRAINING_FACTOR * sum(forward[instance.kind] for instance in program.instances) / tokens
