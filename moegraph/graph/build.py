"""Building layer graphs: one method per thing that a lowering says, and the fake tensors that check it.

Every call is evaluated on fake CPU tensors as it is added, so a graph that does not fit together fails at the node
that is wrong, and each node knows its dtype and shape (`node.meta["val"]`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from moegraph._torch_compat import FakeTensorMode, deferred_graph_module
from moegraph.graph.names import facts, identifier
from moegraph.graph.program import Parameter, Port


class GraphBuilder:
    """Collects the nodes of one block. `made_by` is the pass that every new node is credited to."""

    def __init__(self, made_by: str, fake_mode: FakeTensorMode | None = None) -> None:
        self.made_by = made_by
        self.fake_mode = fake_mode or FakeTensorMode()
        self.graph = fx.Graph()
        self.root = nn.Module()
        self.parameters: dict[str, Parameter] = {}
        self._inputs: list[Port] = []
        self._outputs: list[tuple[Port, fx.Node]] = []

    def _finish(self, node: fx.Node, name: str, value: Any) -> fx.Node:
        node.meta["val"] = value
        facts(node).update(name=name, made_by=self.made_by)
        return node

    def input(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> fx.Node:
        """A placeholder of this shape and dtype."""
        with self.fake_mode:
            value = torch.empty(tuple(shape), dtype=dtype)
        self._inputs.append(Port("input", name))
        return self._finish(self.graph.placeholder(identifier(name)), name, value)

    def parameter(self, parameter: Parameter) -> fx.Node:
        """A `get_attr` of a parameter under its local dotted name; asking twice gives the same node."""
        for node in self.graph.find_nodes(op="get_attr", target=parameter.name):
            found: fx.Node = node
            return found
        self.parameters[parameter.name] = parameter
        owner = self.root
        *path, leaf = parameter.name.split(".")
        for part in path:
            if not hasattr(owner, part):
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        data = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        if parameter.trained:
            owner.register_parameter(leaf, nn.Parameter(data))
        else:
            owner.register_buffer(leaf, data)
        with self.fake_mode:
            value = torch.empty(parameter.shape, dtype=parameter.dtype)
        node = self.graph.create_node("get_attr", parameter.name, name=identifier(parameter.name))
        return self._finish(node, parameter.name, value)

    def call(self, name: str, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """A call of a layer operator; tuple results are taken apart with `result`."""
        node = self.graph.create_node("call_function", target, args, kwargs, name=identifier(name))
        real_args, real_kwargs = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        with self.fake_mode:
            value = target(*real_args, **real_kwargs)
        return self._finish(node, name, value)

    def result(self, name: str, node: fx.Node, index: int) -> fx.Node:
        """The `index`-th result of a tuple-valued call."""
        item = self.graph.create_node("call_function", operator.getitem, (node, index), name=identifier(name))
        return self._finish(item, name, node.meta["val"][index])

    def output(self, role: Any, name: str, node: fx.Node) -> None:
        """Declares an output port."""
        self._outputs.append((Port(role, name), node))

    def finish(self, class_name: str) -> fx.GraphModule:
        """The finished, linted graph module."""
        result = self.graph.output(tuple(node for _, node in self._outputs))
        self._finish(result, "output", tuple(node.meta["val"] for _, node in self._outputs))
        self.graph.lint()
        module = deferred_graph_module(self.root, self.graph, identifier(class_name))
        module.meta["inputs"] = tuple(self._inputs)
        module.meta["outputs"] = tuple(port for port, _ in self._outputs)
        module.meta["parameters"] = dict(self.parameters)
        return module
