"""What it takes to find where a step stopped being finite: the step again, on each rank, node by node.

    RUN/non_finite/step-000004/rank-00001.json
    step, rank, numbers, samples (of each micro-batch of this rank), first (the node, or null),
    parameters and gradients that hold something infinite or NaN, with how many elements

`first` is the first node whose output holds NaN or +inf, in the order in which this rank runs; a parameter that does is
the node that brings it in. -inf does not count, since masks are made of it; what comes of it does. Everything runs
eagerly under the run's own layout, so all ranks take part: collective. The gradient buffers are used up by it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from moegraph.data.loader import StepBatch
from moegraph.graph.names import display_name
from moegraph.graph.program import Instance, Port, ports
from moegraph.runtime.bind import BoundGraph, bind_device
from moegraph.runtime.engine import Engine
from moegraph.runtime.executor import Executor
from moegraph.runtime.start import together
from moegraph.runtime.step import StepComputer

FOLDER = "non_finite"


def dump_step(engine: Engine, step: int, batch: StepBatch, record: Mapping[str, Any], run_folder: Path) -> str:
    """Writes this rank's file and returns a clause that names the first node found here. Collective."""
    parameters = _lost(engine.state.values)
    gradients = _lost(engine.gradients.shard)
    for buffer in engine.gradients.values():
        buffer.zero_()
    executor = _WatchedExecutor(engine)
    StepComputer(engine.spec, executor, engine.gradients, engine.device, engine.mesh).compute(batch)
    mesh, count = engine.mesh, engine.spec.layout.microbatches
    shares = [batch.microbatch(mesh.dp_rank, mesh.dp, index=i, count=count) for i in range(count)]
    content = {
        "step": step,
        "rank": mesh.rank,
        "numbers": {name: _said(value) for name, value in record.items() if isinstance(value, float)},
        "samples": [share["sample_ids"].tolist() for share in shares],
        "first": executor.first,
        "parameters": parameters,
        "gradients": gradients,
    }
    path = run_folder / FOLDER / f"step-{step:06d}" / f"rank-{mesh.rank:05d}.json"
    with together(mesh, "writing what was found"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return _clause(executor.first, mesh.rank, path.parent)


def _clause(first: Mapping[str, Any] | None, rank: int, folder: Path) -> str:
    if first is None:
        return f"every node on rank {rank} is finite when it is run by itself; see {folder}"
    where = f"{first['parameter'] or first['node']} in {first['block']} ({first['graph']})"
    return f"on rank {rank} the first that is not finite is {where}; see {folder}"


class _WatchedExecutor(Executor):
    """Runs every graph node by node and keeps what it saw `first` that is not finite."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.program, engine.state.values, engine.device, "eager", engine.stages)
        self.first: dict[str, Any] | None = None
        self._instance: Instance | None = None
        self.graphs = {kind: _WatchedGraphs(self, kind, engine.device) for kind in self.graphs}

    def _inputs(
        self, graph: BoundGraph, instance: Instance, batch: Mapping[str, Tensor], hidden: Tensor | None
    ) -> dict[Port, Tensor]:
        self._instance = instance
        return super()._inputs(graph, instance, batch, hidden)

    def see(self, label: str, node: fx.Node, port: Port | None, outputs: Sequence[Tensor]) -> None:
        """Keeps the node if it is the first whose output holds NaN or +inf. `port`: of an input of the graph."""
        if self.first is not None or "empty" in str(node.target):
            return
        for value in outputs:
            bad = ~(torch.isfinite(value) | torch.isneginf(value)) if value.is_floating_point() else None
            if bad is None or not bool(bad.any()):
                continue
            at, instance = bad.nonzero()[0].tolist(), self._instance
            assert instance is not None
            self.first = {
                "block": instance.prefix,
                "graph": label,
                "node": display_name(node),
                "operator": str(node.target),
                "parameter": instance.parameters.get(port.name) if port is not None else None,
                "dtype": str(value.dtype).removeprefix("torch."),
                "shape": list(value.shape),
                "not_finite": int(bad.sum()),
                "at": at,
                "value": _said(float(value[tuple(at)])),
            }
            return


class _WatchedGraphs(dict[str, BoundGraph]):
    """The graphs of one kind, each made when it is first wanted."""

    def __init__(self, watch: _WatchedExecutor, kind: str, device: torch.device) -> None:
        super().__init__()
        self._watch, self._kind, self._device = watch, kind, device

    def __missing__(self, name: str) -> BoundGraph:
        module = self._watch.program.units[self._kind].graphs[name]
        self[name] = graph = _WatchedGraph(f"{self._kind}/{name}", module, self._device, "eager")
        graph.watch(_Interpreter(bind_device(module, self._device), graph.label, self._watch))
        return graph


class _WatchedGraph(BoundGraph):
    def watch(self, interpreter: _Interpreter) -> None:
        """From now on the graph runs under this interpreter."""
        self._run = interpreter.run


class _Interpreter(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, label: str, watch: _WatchedExecutor) -> None:
        super().__init__(module)
        self._label, self._watch = label, watch
        inputs = module.graph.find_nodes(op="placeholder")
        self._ports = {node.name: port for node, port in zip(inputs, ports(module, "inputs"), strict=True)}

    def run_node(self, n: fx.Node) -> Any:
        """The node's value, which has been looked at."""
        value = super().run_node(n)
        if n.op != "output":
            self._watch.see(self._label, n, self._ports.get(n.name), _tensors(value))
        return value


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [each for part in value for each in _tensors(part)] if isinstance(value, list | tuple) else []


def _lost(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """How many elements of each tensor are not finite, where there are any."""
    counts = {name: int((~torch.isfinite(value)).sum()) for name, value in tensors.items() if value.is_floating_point()}
    return {name: count for name, count in counts.items() if count}


def _said(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
