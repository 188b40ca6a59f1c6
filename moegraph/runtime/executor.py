"""The executor: runs the blocks of a pipeline stage forward and backward, one micro-batch at a time.

    forward:   hidden travels through the instances; each keeps its hidden input and its saved values
    backward:  in reverse, each instance gets the gradient of its output, returns that of its input, and its weight
               gradients go into the gradient buffers at once, or, where a schedule splits the backward, later

Without pipeline parallelism the whole model is stage 0. Activations die block by block. Parameters are looked up by
their names in the model, so a kind's graph serves all its instances.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from moegraph.graph.program import Instance, Port, Program, Unit
from moegraph.runtime.bind import BoundGraph, CompileMode
from moegraph.runtime.gradients import GradientBuffers

HIDDEN, LOSS, OVERFLOW = "hidden", "loss", "overflow"


@dataclass
class Activations:
    """What one micro-batch leaves behind between its forward and its backward."""

    batch: Mapping[str, Tensor]
    blocks: Sequence[tuple[int, Instance]] = ()  # what ran: (place in the model, block)
    hidden: Tensor | None = None  # what the next stage gets; None after the last one
    unmasked_tokens: int = 0  # tokens that are not padding, known on the host
    entered: list[dict[Port, Tensor]] = field(default_factory=list)  # per instance: hidden input and saved values
    outputs: list[dict[Port, Tensor]] = field(default_factory=list)  # per instance: loss, auxiliary and metric values

    def auxiliary(self, name: str) -> list[tuple[int, Tensor]]:
        """(place in the model, value) of an auxiliary output, in the order of the layers."""
        port = Port("auxiliary", name)
        return [(i, out[port]) for (i, _), out in zip(self.blocks, self.outputs, strict=True) if port in out]

    def metrics(self, name: str) -> list[tuple[int, Tensor]]:
        """(place in the model, value) of a metric of each block that reports it. An auxiliary output of the same name
        counts."""
        ports = (Port("metric", name), Port("auxiliary", name))
        blocks = zip(self.blocks, self.outputs, strict=True)
        return [(i, out[port]) for (i, _), out in blocks for port in ports if port in out]

    @property
    def loss(self) -> Tensor:
        """0-d: this micro-batch's share of the cross entropy."""
        return next(out[Port("loss", LOSS)] for out in reversed(self.outputs) if Port("loss", LOSS) in out)


class _BoundGraphs(dict[str, BoundGraph]):
    """The graphs of one kind by name, each bound when it is first wanted: most schedules do not split the backward."""

    def __init__(self, unit: Unit, device: torch.device, mode: CompileMode) -> None:
        super().__init__()
        self._unit, self._device, self._mode = unit, device, mode

    def __missing__(self, name: str) -> BoundGraph:
        self[name] = BoundGraph(f"{self._unit.kind}/{name}", self._unit.graphs[name], self._device, self._mode)
        return self[name]


class Executor:
    """Bound graphs of every kind and the loop over instances.

    `values` maps the model's parameter and buffer names to tensors on `device`, in the dtype the graphs were traced
    for; they are read at each call, never copied. `stages` are the pipeline stages that this process runs (default
    stage 0, with every instance of a program that has one stage).
    """

    def __init__(
        self,
        program: Program,
        values: Mapping[str, Tensor],
        device: torch.device,
        mode: CompileMode,
        stages: Sequence[int] = (0,),
    ) -> None:
        self.program = program
        self.values = values
        self.stages = {
            stage: [(i, each) for i, each in enumerate(program.instances) if each.stage == stage] for stage in stages
        }
        kinds = {each.kind for blocks in self.stages.values() for _, each in blocks}
        self.graphs: dict[str, dict[str, BoundGraph]] = {
            kind: _BoundGraphs(unit, device, mode) for kind, unit in program.units.items() if kind in kinds
        }
        self._prepared: dict[str, dict[Port, Tensor]] = {}  # by block, until the weights change
        self._one = torch.ones((), dtype=_loss_dtype(program), device=device)

    def compilations(self) -> dict[str, int]:
        """How often each graph that was used has been compiled."""
        graphs = [graph for kind in self.graphs.values() for graph in kind.values()]
        return {graph.label: graph.compilations for graph in graphs if graph.compilations}

    @torch.no_grad()
    def forward(self, batch: Mapping[str, Tensor], hidden: Tensor | None = None, stage: int = 0) -> Activations:
        """One micro-batch forward through a stage. `batch` holds tokens [T], labels [T], positions and document_ids
        [B, S], inverse_targets 0-d; `hidden` [T, D] is what the stage before gave."""
        blocks = self.stages[stage]
        activations = Activations(batch, blocks)
        for _, instance in blocks:
            graph = self.graphs[instance.kind]["forward"]
            results = graph(self._inputs(graph, instance, batch, hidden))
            kept = {port: value for port, value in results.items() if port.role == "saved"}
            if hidden is not None:
                kept[Port("input", HIDDEN)] = hidden
            hidden = results.get(Port("hidden", HIDDEN))
            activations.entered.append(kept)
            activations.outputs.append({p: v for p, v in results.items() if p.role in ("loss", "auxiliary", "metric")})
        activations.hidden = hidden
        return activations

    @torch.no_grad()
    def backward(
        self,
        activations: Activations,
        tangents: Mapping[tuple[int, str], Tensor],
        gradients: GradientBuffers,
        grad: Tensor | None = None,
        later: list[Callable[[], None]] | None = None,
    ) -> Tensor | None:
        """Backward of one micro-batch through the stage that made `activations`. `tangents` maps (place in the model,
        auxiliary name) to the gradient of the loss with respect to that output, `grad` [T, D] is that of its hidden
        output (None for the last stage). Weight gradients go into `gradients`: at once, or, given a list `later`, when
        the calls put into it are made. Returns the gradient of the stage's hidden input, None for the first stage."""
        for place, instance in reversed(activations.blocks):
            graph = self.graphs[instance.kind]["backward" if later is None else "backward_input"]
            values = self._inputs(graph, instance, activations.batch, None)
            values.update(activations.entered.pop())
            values.update(_buffers(graph, instance, gradients))
            weights = self.graphs[instance.kind]["backward_weight"] if later is not None else None
            for port in {*graph.inputs, *(weights.inputs if weights is not None else ())}:
                if port.role == "tangent":
                    values[port] = self._tangent(port.name, place, grad, tangents)
            results = graph(values) if graph.outputs else {}
            grad = results.get(Port("grad_input", HIDDEN))
            if weights is None or later is None:
                del values
                _add(results, instance, gradients)
            else:
                needed = self._inputs(weights, instance, activations.batch, None)
                needed.update({p: v for p, v in (*values.items(), *results.items()) if p in weights.inputs})
                later.append(partial(_weights_later, weights, needed, instance, gradients))
                del values, needed, results
        return grad

    def _tangent(
        self, name: str, index: int, hidden: Tensor | None, tangents: Mapping[tuple[int, str], Tensor]
    ) -> Tensor:
        if name == HIDDEN:
            assert hidden is not None
            return hidden
        return self._one if name == LOSS else tangents[index, name]

    @torch.no_grad()
    def evaluate(
        self,
        batch: Mapping[str, Tensor],
        hidden: Tensor | None = None,
        stage: int = 0,
        overflow: list[Tensor] | None = None,
    ) -> Tensor:
        """One micro-batch forward through a stage, saving nothing for a backward: its hidden output [T, D], or from the
        last stage the cross entropy times `inverse_targets`, 0-d. Rows that found no place are added to `overflow`."""
        for _, instance in self.stages[stage]:
            graph = self.graphs[instance.kind]["evaluate"]
            results = graph(self._inputs(graph, instance, batch, hidden))
            hidden = results.get(Port("hidden", HIDDEN))
            if overflow is not None and Port("metric", OVERFLOW) in results:
                overflow.append(results[Port("metric", OVERFLOW)])
        return hidden if hidden is not None else results[Port("loss", LOSS)]

    def weights_changed(self) -> None:
        """What was made of the weights is made anew when it is wanted."""
        self._prepared.clear()

    def _prepare(self, instance: Instance) -> dict[Port, Tensor]:
        if instance.prefix not in self._prepared:
            graph = self.graphs[instance.kind]["prepare"]
            self._prepared[instance.prefix] = graph(self._inputs(graph, instance, {}, None))
        return self._prepared[instance.prefix]

    def _inputs(
        self, graph: BoundGraph, instance: Instance, batch: Mapping[str, Tensor], hidden: Tensor | None
    ) -> dict[Port, Tensor]:
        found: dict[Port, Tensor] = {}
        for port in graph.inputs:
            if port.role in ("parameter", "buffer"):
                found[port] = self.values[instance.parameters[port.name]]
            elif port.role == "prepared":
                found[port] = self._prepare(instance)[port]
            elif port.role == "input" and port.name != HIDDEN:
                found[port] = batch[port.name]
            elif port.role == "input" and hidden is not None:
                found[port] = hidden
        return found


def _buffers(graph: BoundGraph, instance: Instance, gradients: GradientBuffers) -> dict[Port, Tensor]:
    """What the graph adds gradients to, and whether it keeps what is there; as it is now, before the graph runs."""
    found: dict[Port, Tensor] = {}
    for port in graph.inputs:
        if port.role == "gradient_buffer":
            found[port] = gradients[instance.parameters[port.name]]
        elif port.role == "keep":
            found[port] = gradients.keep(instance.parameters[port.name])
    return found


def _add(results: Mapping[Port, Tensor], instance: Instance, gradients: GradientBuffers) -> None:
    for port, value in results.items():
        if port.role == "grad":
            gradients.add(instance.parameters[port.name], value)
        elif port.role == "added":
            gradients.added(instance.parameters[port.name])


def _weights_later(
    graph: BoundGraph, values: dict[Port, Tensor], instance: Instance, gradients: GradientBuffers
) -> None:
    """The weight gradients of one block from what `backward_input` left for them, which is let go of."""
    with torch.no_grad():
        values.update(_buffers(graph, instance, gradients))
        results = graph(values) if graph.outputs else {}
        values.clear()
        _add(results, instance, gradients)


def _loss_dtype(program: Program) -> torch.dtype:
    module = program.units["head"].graphs["forward"]
    results = next(iter(module.graph.find_nodes(op="output"))).meta["val"]
    outputs = [Port(*port) for port in module.meta["outputs"]]
    dtype: torch.dtype = results[outputs.index(Port("loss", LOSS))].dtype
    return dtype
