"""One kind of block before and after a pass, on as many ranks as its graphs need.

A block with collectives runs on all ranks of a simulated expert group, each with tokens of its own. Where the pass is
the one that spreads experts over ranks, the block before it runs once for each rank's tokens with all experts, and

    outputs, gradient of the input, gradients of dense parameters     equal on each rank
    gradients of the experts on rank r                                Σ over all ranks' tokens before, part r of it

Later passes have distributed blocks on both sides, which are compared rank by rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moegraph import ops
from moegraph.graph.effects import is_communication
from moegraph.graph.names import display_name
from moegraph.graph.program import Port, Program, Unit
from moegraph.ops.dispatch import bucket_capacity
from moegraph.passes.contract import PassContext
from moegraph.passes.dispatch_experts import DispatchExperts
from moegraph.verify.compare import Difference, compare
from moegraph.verify.inputs import local_inputs, random_inputs
from moegraph.verify.run import Execution, execute
from moegraph.verify.world import World

Inputs = Mapping[Port, Tensor]
TIGHT = 0.5  # of a balanced load: buckets that cannot hold everything


@dataclass(frozen=True)
class Trial:
    """What a block before a pass gives for some inputs, one entry per rank, as the block after it should."""

    inputs: Sequence[Inputs]
    expected: Sequence[Execution]
    spread: bool = False  # experts are on one rank before the pass, and on several after it

    def difference(self, found: Sequence[Execution], tolerance: float) -> Difference:
        """The largest differences over all ranks; the first node and what is missing are those of one rank."""
        each = [compare(self._comparable(*pair), pair[1], tolerance) for pair in zip(self.expected, found, strict=True)]
        wrong = next((difference for difference in each if not difference.within(tolerance)), each[0])
        outputs, gradients = max(d.outputs for d in each), max(d.gradients for d in each)
        return Difference(outputs, gradients, wrong.first_node, wrong.missing)

    def _comparable(self, was: Execution, now: Execution) -> Execution:
        """Nodes that see other rows than before say nothing about where a difference begins."""
        if not self.spread:
            return was
        values = {name: value for name, value in was.values.items() if _alike(value, now.values.get(name))}
        return replace(was, values=values)


def prepare(program: Program, before: Unit, after: Unit, seed: int) -> Trial:
    """Inputs for each rank that the block needs, and what the block before the pass makes of them."""
    ranks = max(ranks_of(before, program), ranks_of(after, program))
    inputs = [random_inputs(program, before.layer_graph, seed, rank) for rank in range(ranks)]
    found = execute_ranks(before, inputs)
    if ranks_of(before, program) == ranks:
        return Trial(inputs, found)
    return Trial(inputs, _distributed(found, after), spread=True)


def ranks_of(unit: Unit, program: Program) -> int:
    """How many ranks a block's graphs need: those of the expert group if they communicate, else one."""
    graphs = unit.graphs.values()
    talks = any(is_communication(node) for module in graphs for node in module.graph.nodes)
    return program.spec.layout.ep if talks else 1


def execute_ranks(unit: Unit, inputs: Sequence[Inputs], choosing: Sequence[Execution] | None = None) -> list[Execution]:
    """Runs a unit on each rank's inputs, all ranks together; `choosing` experts as these executions did, if given.
    Raises `CheckFailed` where their collectives differ."""
    local = [local_inputs(each, unit, rank) for rank, each in enumerate(inputs)]
    choices = [None] * len(local) if choosing is None else [each.values for each in choosing]
    if len(local) == 1:
        return [execute(unit, local[0], choices[0])]
    return World(len(local)).run(lambda rank: execute(unit, local[rank.index], choices[rank.index]))


def _distributed(found: Sequence[Execution], after: Unit) -> list[Execution]:
    """What ranks with all experts found, as ranks with a part of them each should find it."""
    parameters = after.layer_graph.meta["parameters"]
    spread = [name for name, parameter in parameters.items() if parameter.shards > 1 and parameter.trained]
    sums = {Port("grad", name): _sum([each.results[Port("grad", name)] for each in found]) for name in spread}
    expected = []
    for rank, each in enumerate(found):
        parts = {port: total.chunk(len(found))[rank] for port, total in sums.items()}
        expected.append(replace(each, results={**each.results, **parts}))
    return expected


def _sum(values: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(values)).double().sum(dim=0).to(values[0].dtype)


def lost_rows(execution: Execution) -> int:
    """Rows that did not travel for want of room, counted or dropped by rule."""
    counts = [execution.results.get(Port("metric", name)) for name in ("overflow", "dropped")]
    return sum(int(count) for count in counts if count is not None)


def check_tight_buckets(made_by: DispatchExperts, program: Program, before: Unit, seed: int) -> tuple[int, list[str]]:
    """Dispatches with buckets that are too small. Returns how many rows the ranks said did not fit, and a sentence for
    each number that is not that of the routing, counted in plain loops."""
    tight = replace(made_by, capacity=TIGHT)
    unit = tight.apply(before, PassContext(program)).unit
    inputs = [random_inputs(program, before.layer_graph, seed, rank) for rank in range(made_by.ep)]
    found = execute_ranks(unit, inputs)
    counted = {f"rank {rank}": lost_rows(execution) for rank, execution in enumerate(found)}
    loads = [_loads(before, execution.values, made_by.ep) for execution in found]
    expected = {f"rank {rank}": sum(_beyond(run, _room(run)) for run in runs) for rank, runs in enumerate(loads)}
    if made_by.transport == "direct" and not made_by.drop:  # a buffer is full when all ranks together have filled it
        together = [sum(column) for column in zip(*(runs[0] for runs in loads), strict=True)]
        counted = {"all ranks": sum(counted.values())}
        expected = {"all ranks": _beyond(together, made_by.ep * _room(loads[0][0]))}
    problems = [
        f"{before.kind}: at capacity {TIGHT} {expected[who]} rows of {who} do not fit, and {number} are counted"
        for who, number in counted.items()
        if number != expected[who]
    ]
    return sum(counted.values()), problems


def _room(loads: Sequence[int]) -> int:
    return bucket_capacity(sum(loads), len(loads), TIGHT)


def _beyond(loads: Sequence[int], room: int) -> int:
    return sum(max(0, load - room) for load in loads)


def _loads(before: Unit, values: Mapping[str, Any], ranks: int) -> list[list[int]]:
    """How many of a rank's choices go to each rank, from the router's ids; one list for each run of tokens that is
    dispatched on its own."""
    found = []
    for sort in before.graphs["layer"].graph.find_nodes(op="call_function", target=ops.sort_by_expert):
        chosen, experts = sort.args
        ids: Tensor = values[display_name(chosen)]
        loads = [0] * ranks
        for choice in ids.flatten().tolist():
            loads[choice * ranks // experts] += 1
        found.append(loads)
    return found


def _alike(value: Any, other: Any) -> bool:
    return isinstance(value, Tensor) and isinstance(other, Tensor) and value.shape == other.shape
