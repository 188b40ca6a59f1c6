"""The first value of a step that differs between two traces.

    weights made ready < forwards < backwards < weight gradients put off < moments < gradients < weights after the step
    within: micro-batch by micro-batch; blocks as they run, backwards last block first; nodes in the order of the graph

In this order nothing depends on anything later, on any rank and under any schedule, so what comes first and differs has
inputs that are all equal. Nodes are matched by rank, micro-batch, block, graph and name; where graphs differ, nodes
that only one side has are counted, and the first of them is said.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from moegraph.checkpoint.same_run import differences
from moegraph.errors import UsageError
from moegraph.runtime.trace_file import NONE, GraphCall, Node, Trace

_PHASES = {"prepare": 0, "forward": 1, "backward": 2, "backward_input": 2, "backward_weight": 3}
_KEPT = {
    "moment": (4, "the moment {} that the step found"),
    "gradient": (5, "the gradient of {}"),
    "weight": (6, "{} after the step"),
}
_SAME_LAYOUT = ("dp", "ep", "pp", "microbatches")


class Key(NamedTuple):
    """What says that two values are the same one. `microbatch` is -1 for what no micro-batch has."""

    rank: int
    microbatch: int
    block: str
    graph: str
    name: str


class Order(NamedTuple):
    """When a value is made: nothing depends on anything later."""

    phase: int
    microbatch: int
    place: int
    position: int
    rank: int


@dataclass(frozen=True)
class Value:
    """A value of a trace: where, and what it is. `parameter` is the model's name of a weight."""

    key: Key
    order: Order
    digest: str
    node: Node | None = None
    parameter: str | None = None

    @property
    def sentence(self) -> str:
        """What it is called, with layer, direction, pass, micro-batch and rank."""
        rank = f"on rank {self.key.rank}"
        if self.node is None:
            return f"{_KEPT[self.key.graph][1].format(self.key.name)}, {rank}"
        where = f"the {self.key.graph} of {self.key.block}"
        when = f"micro-batch {self.key.microbatch}, " if self.key.microbatch >= 0 else ""
        if self.parameter is not None:
            return f"the weight {self.parameter} that {where} reads, {when}{rank}"
        made_by = f", made by {self.node.made_by}" if self.node.made_by else ""
        layer = f", of {self.node.layer} {self.node.direction}" if self.node.layer else ""
        return f"{self.node.name}{layer}{made_by}, in {where}, {when}{rank}"

    def to_json(self) -> dict[str, Any]:
        """As JSON-able data."""
        node = self.node.model_dump() if self.node is not None else None
        return {**self.key._asdict(), "digest": self.digest, "node": node, "parameter": self.parameter}


@dataclass(frozen=True)
class Comparison:
    """`first`: the first value that both have and that differs, on each side; `compared` and `differing` count values.
    `only`: how many values one side alone has, `only_first` the first of each side. `specs`: what the specs say
    differently."""

    compared: int
    differing: int
    first: tuple[Value, Value] | None
    only: tuple[int, int]
    only_first: tuple[Value | None, Value | None]
    specs: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """As JSON-able data."""
        first = [each.to_json() for each in self.first] if self.first is not None else None
        only = [each.to_json() if each is not None else None for each in self.only_first]
        return {**asdict(self), "first": first, "only_first": only}


def compare(a: Trace, b: Trace) -> Comparison:
    """What differs. Raises UsageError for traces of other steps, or of layouts that share a batch out otherwise."""
    _check_comparable(a, b)
    there = {value.key: value for value in values_of(b)}
    compared = differing = only_here = 0
    first: tuple[Value, Value] | None = None
    first_here: Value | None = None
    for mine in values_of(a):
        other = there.pop(mine.key, None)
        if other is None:
            only_here += 1
            first_here = mine if first_here is None or mine.order < first_here.order else first_here
            continue
        compared += 1
        if mine.digest == other.digest:
            continue
        differing += 1
        if first is None or mine.order < first[0].order:
            first = (mine, other)
    first_there = min(there.values(), key=lambda value: value.order, default=None)
    specs = tuple(f"{path}: {change}" for path, change in differences(a.spec, b.spec))
    return Comparison(compared, differing, first, (only_here, len(there)), (first_here, first_there), specs)


def _check_comparable(a: Trace, b: Trace) -> None:
    if a.step != b.step:
        raise UsageError(f"{a.run} was traced at step {a.step}, and {b.run} at step {b.step}: trace the same one")
    layouts = [{name: trace.spec.get("layout", {}).get(name) for name in _SAME_LAYOUT} for trace in (a, b)]
    if layouts[0] != layouts[1] or len(a.ranks) != len(b.ranks):
        shown = " and ".join(", ".join(f"{name} {value}" for name, value in each.items()) for each in layouts)
        raise UsageError(
            f"the layouts share the batch out otherwise ({shown}), so their values cannot be told apart one by one: "
            "give both runs one layout with --set layout.…"
        )


def values_of(trace: Trace) -> Iterator[Value]:
    """Every value of a trace that has a digest, rank by rank."""
    for rank, found in enumerate(trace.ranks):
        for call in found.calls:
            nodes = found.graphs[call.label]
            for index, node in enumerate(nodes):
                digest = call.digest(index)
                if digest != NONE:
                    yield _node_value(trace, rank, call, index, node, digest)
        for kind, tensors in (("moment", found.moments), ("gradient", found.gradients), ("weight", found.weights)):
            for index, (name, digest) in enumerate(tensors.items()):
                yield Value(Key(rank, -1, "", kind, name), Order(_KEPT[kind][0], 0, 0, index, rank), digest)


def _node_value(trace: Trace, rank: int, call: GraphCall, index: int, node: Node, digest: str) -> Value:
    block = trace.blocks[call.place]
    microbatch = -1 if call.microbatch is None else call.microbatch
    phase = _PHASES.get(call.graph, 1)
    order = Order(phase, microbatch, -call.place if phase > 1 else call.place, index, rank)
    parameter = block.parameters.get(node.parameter) if node.parameter is not None else None
    return Value(Key(rank, microbatch, block.prefix, call.graph, node.name), order, digest, node, parameter)
