"""Binding a step graph to its device and compiling it.

Graphs are traced on the CPU; here the device of factory nodes (`zeros`, `arange` …) becomes the run's, and the graph is
handed to torch.compile. Each graph is compiled once: a second compilation is counted and shown, because it means that
a shape or a stride moved with the data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, fx

from moegraph._torch_compat import compile_backend
from moegraph.errors import CheckFailed
from moegraph.graph.edit import clone
from moegraph.graph.names import display_name
from moegraph.graph.program import Port, ports
from moegraph.graph.text import value_text
from moegraph.runtime.compile_lock import one_rank_at_a_time

CompileMode = Literal["inductor", "aot_eager", "eager"]


def bind_device(module: fx.GraphModule, device: torch.device) -> fx.GraphModule:
    """A copy of the graph whose factory nodes make tensors on `device`."""
    bound = clone(module)
    for node in bound.graph.nodes:
        if isinstance(node.kwargs.get("device"), torch.device):
            node.kwargs = {**node.kwargs, "device": device}
    plain = fx.GraphModule(bound, bound.graph, class_name=type(module).__name__)  # with its code
    plain.meta = bound.meta
    return plain


class BoundGraph:
    """One step graph ready to run. `compilations` counts how often it was compiled."""

    def __init__(self, label: str, module: fx.GraphModule, device: torch.device, mode: CompileMode) -> None:
        self.label = label
        self.inputs: tuple[Port, ...] = ports(module, "inputs")
        self.outputs: tuple[Port, ...] = ports(module, "outputs")
        self.compilations = 0
        self._checked = False
        self._described = [
            (display_name(node), value_text(node.meta["val"])) for node in module.graph.find_nodes(op="placeholder")
        ]
        bound = bind_device(module, device)
        self._run: Callable[..., Sequence[Tensor]] = bound if mode == "eager" else self._compiled(bound, mode)

    def _compiled(self, bound: fx.GraphModule, mode: CompileMode) -> Callable[..., Sequence[Tensor]]:
        inner = compile_backend(mode)

        def backend(module: fx.GraphModule, example_inputs: list[Tensor]) -> Any:
            with one_rank_at_a_time(self.label):
                code = inner(module, example_inputs)
            self.compilations += 1  # not before: Dynamo may raise in there to trace once more for the same compilation
            return code

        compiled: Callable[..., Sequence[Tensor]] = torch.compile(bound, backend=backend, fullgraph=True, dynamic=False)
        return compiled

    def __call__(self, values: Mapping[Port, Tensor]) -> dict[Port, Tensor]:
        """Runs the graph on the values of its input ports and returns those of its output ports. Raises `CheckFailed`
        when the first values it gets are not what the graph was traced for: it would be compiled for something else."""
        if not self._checked:
            self.check_inputs(values)
            self._checked = True
        results = self._run(*[values[port] for port in self.inputs])
        return dict(zip(self.outputs, results, strict=True))

    def check_inputs(self, values: Mapping[Port, Tensor]) -> None:
        """Raises `CheckFailed` when a value does not have the dtype and shape the graph was traced for."""
        for port, (name, expected) in zip(self.inputs, self._described, strict=True):
            if value_text(values[port]) != expected:
                found = value_text(values[port])
                raise CheckFailed(f"{self.label}: input {name} is {found}, the graph wants {expected}")
