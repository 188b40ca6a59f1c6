"""A program: a list of block instances, one set of graphs per kind of block, and the parameters they share.

A *kind* is a block that occurs once or many times (embedding, each sort of layer, head). Its graphs name everything
relative to the block (`moe.route`); an *instance* joins its prefix (`layers.3`) and maps the kind's parameter names to
the names of the model. Whatever differs between two layers makes two kinds, so a graph is compiled once per kind.

A graph's inputs and outputs are *ports*: (role, name) pairs kept in `graph_module.meta["inputs"]` and `["outputs"]`,
in the order of its placeholders and results. Layer graphs read parameters through `get_attr`; step graphs take them
as inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import fx

from moegraph.specs.schema import Spec

Role = Literal[
    "parameter",  # a trained weight of the block
    "buffer",  # state that is read but not trained by gradients (the selection bias)
    "input",  # activations and batch fields
    "tangent",  # gradient of an output, one per differentiable output
    "prepared",  # made of parameters alone, once per optimizer step
    "saved",  # forward value kept for backward
    "live",  # value passed from backward_input to backward_weight
    "hidden",  # output: the residual stream
    "loss",  # output: 0-d, this block's share of the training loss
    "auxiliary",  # output: 0-d auxiliary loss before its coefficient, or a vector the runtime turns into one
    "metric",  # output: reported, never differentiated
    "grad_input",  # gradient of the block's hidden input
    "grad",  # gradient of a parameter
    "gradient_buffer",  # input that is written to: where the gradient of a parameter is summed up
    "keep",  # input [1]: whether that buffer holds gradients of this step already
    "added",  # the gradient of a parameter has been added to its buffer; an empty tensor
]


class Port(NamedTuple):
    """One input or output of a graph."""

    role: Role
    name: str


def ports(module: fx.GraphModule, side: Literal["inputs", "outputs"]) -> tuple[Port, ...]:
    """The ports of a graph, in positional order."""
    return tuple(Port(*port) for port in module.meta[side])


def results(module: fx.GraphModule) -> tuple[fx.Node, ...]:
    """The nodes a graph returns, in the order of its output ports."""
    (output,) = module.graph.find_nodes(op="output")
    nodes: Any = output.args[0]
    return tuple(nodes)


def saved_bytes(module: fx.GraphModule) -> int:
    """Bytes that one run of a step graph hands to backward, beyond parameters and block inputs."""
    kept = [node for port, node in zip(ports(module, "outputs"), results(module), strict=True) if port.role == "saved"]
    return sum(node.meta["val"].nbytes for node in kept)


@dataclass(frozen=True)
class Parameter:
    """A trained parameter or a buffer of the whole model.

    `init` says how it starts: `normal` with `std`, `ones` or `zeros`. `dtype` is what the graphs read it in; the
    master weight may be wider. `experts` is true when axis 0 counts experts. `shape` is what one rank holds: with
    `shards` above 1, axis 0 is spread evenly over that many ranks of the expert group, in their order.
    """

    name: str
    shape: tuple[int, ...]
    role: Literal["embedding", "matrix", "router", "expert", "norm", "bias", "expert_bias", "select_bias"]
    init: Literal["normal", "ones", "zeros"]
    std: float = 0.0
    trained: bool = True
    dtype: torch.dtype = torch.float32
    shards: int = 1

    @property
    def global_shape(self) -> tuple[int, ...]:
        """The shape in the whole model."""
        return (self.shape[0] * self.shards, *self.shape[1:]) if self.shape else self.shape

    @property
    def experts(self) -> bool:
        """Whether axis 0 counts experts."""
        return self.role in ("expert", "expert_bias")

    @property
    def numel(self) -> int:
        """Number of elements in the whole model."""
        count = self.shards
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True)
class Instance:
    """One block of the model: which kind it is, and which parameters of the model are its own.

    `parameters` maps the kind's local names to names of the model, trained parameters and buffers alike.
    """

    prefix: str
    kind: str
    parameters: Mapping[str, str]
    layer: int | None = None
    stage: int = 0


@dataclass(frozen=True)
class Unit:
    """The graphs of one kind at one moment of the pipeline.

    `graphs` is `{"layer": …}` for layer passes, `{"joint": …}` for step passes, and after the cut the five step
    graphs. `options` are the choices that made this kind differ from others, such as its recompute policy. `layer` is
    the layer graph that the step graphs were traced from.
    """

    kind: str
    graphs: Mapping[str, fx.GraphModule]
    options: Mapping[str, str] = field(default_factory=dict)
    layer: fx.GraphModule | None = None

    @property
    def layer_graph(self) -> fx.GraphModule:
        """The layer graph, at the layer level or as it was when the step graphs were traced from it."""
        return self.layer if self.layer is not None else self.graphs["layer"]

    def with_graphs(self, graphs: Mapping[str, fx.GraphModule]) -> Unit:
        """The same kind with other graphs."""
        return replace(self, graphs=graphs)


@dataclass(frozen=True)
class Program:
    """The whole model at one moment of the pipeline."""

    spec: Spec
    units: Mapping[str, Unit]
    instances: tuple[Instance, ...]
    parameters: Mapping[str, Parameter]

    def with_units(self, units: Mapping[str, Unit]) -> Program:
        """The same program with other graphs, and the parameters that they declare."""
        blocks = [instance for instance in self.instances if instance.kind in units]
        parameters = {**self.parameters, **declared_parameters(units, blocks)}
        return replace(self, units=units, parameters=parameters)

    def instances_of(self, kind: str) -> tuple[Instance, ...]:
        """The blocks of one kind, in the order they run."""
        return tuple(instance for instance in self.instances if instance.kind == kind)

    def trained(self) -> Iterator[Parameter]:
        """Every parameter that gradients train, once, in the order of the model."""
        return (parameter for parameter in self.parameters.values() if parameter.trained)


def declared_parameters(units: Mapping[str, Unit], instances: Iterable[Instance]) -> dict[str, Parameter]:
    """The model's parameters by name, as the blocks that read them declare them, in the order of the model."""
    found: dict[str, Parameter] = {}
    for instance in instances:
        for name, parameter in units[instance.kind].layer_graph.meta["parameters"].items():
            model_name = instance.parameters[name]
            if model_name not in found:
                found[model_name] = replace(parameter, name=model_name)
    return found
