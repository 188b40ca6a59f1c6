"""What a block costs: its forward floating-point operations over one micro-batch, and its parameters.

Conventions of the operations are those of `moegraph.ops.flops`: matrix products only, a multiply and an add are two.
The embedding is a lookup and costs none. Under expert parallelism a rank's experts have room for more rows than a
balanced routing sends them; only as many count as the micro-batch's own tokens are routed to.
"""

from __future__ import annotations

from typing import NamedTuple

from moegraph import ops
from moegraph.graph.program import Program
from moegraph.ops.flops import flops

_ROWS = {ops.grouped_mm: 0, ops.expert_ffn: 1}  # which argument has a row per routed row


class Cost(NamedTuple):
    """Forward operations over one micro-batch, and trained parameters."""

    flops: int
    parameters: int

    def plus(self, other: Cost) -> Cost:
        """Both together."""
        return Cost(self.flops + other.flops, self.parameters + other.parameters)


def forward_flops(program: Program, kind: str) -> int:
    """Forward operations of one block of this kind over one micro-batch, on one rank."""
    spec = program.spec
    routed = spec.sequences_per_microbatch * spec.data.seq_len * (spec.model.moe.top_k if spec.model.moe else 0)
    total = 0
    for node in program.units[kind].layer_graph.graph.nodes:
        if node.op == "call_function":
            args = [getattr(arg, "meta", {}).get("val", arg) for arg in node.args]
            own = flops(node.target, args, node.kwargs)
            if node.target in _ROWS:
                rows = args[_ROWS[node.target]].shape[0]
                own = own // rows * min(rows, routed)
            total += own
    return total


def instance_costs(program: Program) -> tuple[Cost, ...]:
    """The cost of each block of the program, in order. A parameter of two blocks (a tied embedding) counts in the
    first."""
    forward = {kind: forward_flops(program, kind) for kind in program.units}
    counted: set[str] = set()
    costs = []
    for instance in program.instances:
        own = [program.parameters[name] for name in instance.parameters.values() if name not in counted]
        counted.update(parameter.name for parameter in own)
        costs.append(Cost(forward[instance.kind], sum(p.numel for p in own if p.trained)))
    return tuple(costs)
