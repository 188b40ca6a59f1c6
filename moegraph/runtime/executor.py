"""The executor: runs a program's blocks forward and backward, one micro-batch at a time.

    forward:   hidden travels through the instances; each keeps its hidden input and its saved values
    backward:  in reverse, each instance gets the gradient of its output, returns that of its input, and its weight
               gradients go into the gradient buffers at once

Activations die block by block. Parameters are looked up by their names in the model, so a kind's graph serves all its
instances.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moegraph.graph.program import Instance, Port, Program
from moegraph.runtime.bind import BoundGraph, CompileMode
from moegraph.runtime.gradients import GradientBuffers

HIDDEN, LOSS = "hidden", "loss"
GRAPHS = ("forward", "backward", "evaluate")


@dataclass
class Activations:
    """What one micro-batch leaves behind between its forward and its backward."""

    batch: Mapping[str, Tensor]
    unmasked_tokens: int = 0  # tokens that are not padding, known on the host
    entered: list[dict[Port, Tensor]] = field(default_factory=list)  # per instance: hidden input and saved values
    outputs: list[dict[Port, Tensor]] = field(default_factory=list)  # per instance: loss, auxiliary and metric values

    def auxiliary(self, name: str) -> list[tuple[int, Tensor]]:
        """(instance index, value) of an auxiliary output, in the order of the layers."""
        port = Port("auxiliary", name)
        return [(i, out[port]) for i, out in enumerate(self.outputs) if port in out]

    def metrics(self, name: str) -> list[Tensor]:
        """A metric of each block that reports it. An auxiliary output of the same name counts."""
        ports = (Port("metric", name), Port("auxiliary", name))
        return [out[port] for out in self.outputs for port in ports if port in out]

    @property
    def loss(self) -> Tensor:
        """0-d: this micro-batch's share of the cross entropy."""
        return next(out[Port("loss", LOSS)] for out in reversed(self.outputs) if Port("loss", LOSS) in out)


class Executor:
    """Bound graphs of every kind and the loop over instances.

    `values` maps the model's parameter and buffer names to tensors on `device`, in the dtype the graphs were traced
    for; they are read at each call, never copied.
    """

    def __init__(self, program: Program, values: Mapping[str, Tensor], device: torch.device, mode: CompileMode) -> None:
        self.program = program
        self.values = values
        self.graphs: dict[str, dict[str, BoundGraph]] = {
            kind: {name: BoundGraph(f"{kind}/{name}", unit.graphs[name], device, mode) for name in GRAPHS}
            for kind, unit in program.units.items()
        }
        self._one = torch.ones((), dtype=_loss_dtype(program), device=device)

    def compilations(self) -> dict[str, int]:
        """How often each graph that was used has been compiled."""
        graphs = [graph for kind in self.graphs.values() for graph in kind.values()]
        return {graph.label: graph.compilations for graph in graphs if graph.compilations}

    @torch.no_grad()
    def forward(self, batch: Mapping[str, Tensor]) -> Activations:
        """One micro-batch forward. `batch` holds tokens [T], labels [T], positions and document_ids [B, S],
        inverse_targets 0-d."""
        activations = Activations(batch)
        hidden: Tensor | None = None
        for instance in self.program.instances:
            graph = self.graphs[instance.kind]["forward"]
            results = graph(self._inputs(graph, instance, batch, hidden))
            kept = {port: value for port, value in results.items() if port.role == "saved"}
            if hidden is not None:
                kept[Port("input", HIDDEN)] = hidden
            hidden = results.get(Port("hidden", HIDDEN), hidden)
            activations.entered.append(kept)
            activations.outputs.append({p: v for p, v in results.items() if p.role in ("loss", "auxiliary", "metric")})
        return activations

    @torch.no_grad()
    def backward(
        self, activations: Activations, tangents: Mapping[tuple[int, str], Tensor], gradients: GradientBuffers
    ) -> None:
        """Backward of one micro-batch. `tangents` maps (instance index, auxiliary name) to the gradient of the loss
        with respect to that output; weight gradients go into `gradients`."""
        hidden_tangent: Tensor | None = None
        for index in range(len(self.program.instances) - 1, -1, -1):
            instance = self.program.instances[index]
            graph = self.graphs[instance.kind]["backward"]
            values = self._inputs(graph, instance, activations.batch, None)
            values.update(activations.entered.pop())
            for port in graph.inputs:
                if port.role == "tangent":
                    values[port] = self._tangent(port.name, index, hidden_tangent, tangents)
            results = graph(values)
            del values
            hidden_tangent = results.get(Port("grad_input", HIDDEN))
            for port, value in results.items():
                if port.role == "grad":
                    gradients.add(instance.parameters[port.name], value)

    def _tangent(
        self, name: str, index: int, hidden: Tensor | None, tangents: Mapping[tuple[int, str], Tensor]
    ) -> Tensor:
        if name == HIDDEN:
            assert hidden is not None
            return hidden
        return self._one if name == LOSS else tangents[index, name]

    @torch.no_grad()
    def evaluate(self, batch: Mapping[str, Tensor]) -> Tensor:
        """0-d: the cross entropy of one micro-batch times its `inverse_targets`, saving nothing for a backward."""
        hidden: Tensor | None = None
        for instance in self.program.instances:
            graph = self.graphs[instance.kind]["evaluate"]
            results = graph(self._inputs(graph, instance, batch, hidden))
            hidden = results.get(Port("hidden", HIDDEN), hidden)
        return results[Port("loss", LOSS)]

    def _inputs(
        self, graph: BoundGraph, instance: Instance, batch: Mapping[str, Tensor], hidden: Tensor | None
    ) -> dict[Port, Tensor]:
        found: dict[Port, Tensor] = {}
        for port in graph.inputs:
            if port.role in ("parameter", "buffer"):
                found[port] = self.values[instance.parameters[port.name]]
            elif port.role == "input" and port.name != HIDDEN:
                found[port] = batch[port.name]
            elif port.role == "input" and hidden is not None:
                found[port] = hidden
        return found


def _loss_dtype(program: Program) -> torch.dtype:
    module = program.units["head"].graphs["forward"]
    results = next(iter(module.graph.find_nodes(op="output"))).meta["val"]
    outputs = [Port(*port) for port in module.meta["outputs"]]
    dtype: torch.dtype = results[outputs.index(Port("loss", LOSS))].dtype
    return dtype
