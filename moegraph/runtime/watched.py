"""A step run node by node, every value shown to whoever watches: what dumps and traces are made of.

    executor = WatchedExecutor(engine, see)
    StepComputer(spec, executor, gradients, device, mesh).compute(batch)    see(call, node, port, values), node by node

Everything runs eagerly, in the order in which this rank runs it. `values` are the tensors that a node gives, and the
gradient buffer that it adds to, if it does. A graph's own inputs are nodes too: `port` says which.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from moegraph.graph.collectives import is_unfinished
from moegraph.graph.program import Instance, Port, ports
from moegraph.ops.registry import ADDING
from moegraph.runtime.bind import BoundGraph, bind_device
from moegraph.runtime.engine import Engine
from moegraph.runtime.executor import Executor


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a graph: of which block, and of which micro-batch (None: made of weights alone)."""

    kind: str
    graph: str
    instance: Instance
    microbatch: int | None

    @property
    def label(self) -> str:
        """The graph as it is called elsewhere: `moe/forward`."""
        return f"{self.kind}/{self.graph}"


See = Callable[[Call, fx.Node, Port | None, Sequence[Tensor]], None]


def has_no_value(node: fx.Node) -> bool:
    """Whether what a node gives is not to be looked at: memory that nothing was written to, or that another rank is
    still writing to."""
    return "empty" in str(node.target) or is_unfinished(node)


class WatchedExecutor(Executor):
    """Runs every graph node by node and shows `see` what it computes."""

    def __init__(self, engine: Engine, see: See) -> None:
        super().__init__(engine.executor.program, engine.state.values, engine.device, "eager", engine.stages)
        self._batches: list[Mapping[str, Tensor]] = []  # micro-batches, in the order in which they entered
        self.graphs = {kind: _WatchedGraphs(self, kind, engine.device, see) for kind in self.graphs}

    def _inputs(
        self, graph: BoundGraph, instance: Instance, batch: Mapping[str, Tensor], hidden: Tensor | None
    ) -> dict[Port, Tensor]:
        kind, name = graph.label.split("/")
        call = Call(kind, name, instance, self._number(batch) if batch else None)
        return _Values(super()._inputs(graph, instance, batch, hidden), call)

    def _number(self, batch: Mapping[str, Tensor]) -> int:
        for number, known in enumerate(self._batches):
            if known is batch:
                return number
        self._batches.append(batch)
        return len(self._batches) - 1


class _Values(dict[Port, Tensor]):
    """The inputs of a call, which knows whose they are: a weight gradient may be computed long after."""

    def __init__(self, values: Mapping[Port, Tensor], call: Call) -> None:
        super().__init__(values)
        self.call = call


class _WatchedGraphs(dict[str, BoundGraph]):
    """The graphs of one kind, each made when it is first wanted."""

    def __init__(self, executor: Executor, kind: str, device: torch.device, see: See) -> None:
        super().__init__()
        self._executor, self._kind, self._device, self._see = executor, kind, device, see

    def __missing__(self, name: str) -> BoundGraph:
        module = self._executor.program.units[self._kind].graphs[name]
        self[name] = graph = _WatchedGraph(f"{self._kind}/{name}", module, self._device, self._see)
        return graph


class _WatchedGraph(BoundGraph):
    def __init__(self, label: str, module: fx.GraphModule, device: torch.device, see: See) -> None:
        super().__init__(label, module, device, "eager")
        self._interpreter = _Interpreter(bind_device(module, device), see)
        self._run = self._interpreter.run

    def __call__(self, values: Mapping[Port, Tensor]) -> dict[Port, Tensor]:
        assert isinstance(values, _Values), self.label
        self._interpreter.call = values.call
        return super().__call__(values)


class _Interpreter(fx.Interpreter):
    call: Call

    def __init__(self, module: fx.GraphModule, see: See) -> None:
        super().__init__(module)
        self._see = see
        inputs = module.graph.find_nodes(op="placeholder")
        self._ports = {node.name: port for node, port in zip(inputs, ports(module, "inputs"), strict=True)}

    def run_node(self, n: fx.Node) -> Any:
        """The node's value, which has been looked at."""
        value = super().run_node(n)
        if n.op != "output":
            values = _tensors(value)
            if n.target in ADDING:
                values.append(self.env[n.args[0]])  # type: ignore[index]
            self._see(self.call, n, self._ports.get(n.name), values)
        return value


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [each for part in value for each in _tensors(part)] if isinstance(value, list | tuple) else []
