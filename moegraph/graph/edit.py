"""Editing a graph: clones that share nothing, and insertion of named, typed, credited nodes."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from moegraph._torch_compat import deferred_graph_module
from moegraph.graph.names import display_name, facts, identifier, unique_name
from moegraph.graph.program import Parameter, Port, Role


def clone(module: fx.GraphModule) -> fx.GraphModule:
    """The same graph module with a graph and node facts of its own; parameters are shared (they are meta tensors)."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        new = graph.create_node(
            node.op,
            node.target,
            fx.map_arg(node.args, lambda n: env[n]),
            fx.map_arg(node.kwargs, lambda n: env[n]),
            name=node.name,
        )
        new.meta = {**node.meta, "custom": copy.deepcopy(node.meta.get("custom", {}))}
        env[node] = new
    twin = deferred_graph_module(module, graph, type(module).__name__)
    twin.meta = dict(module.meta)
    return twin


class Rewriter:
    """A clone of a graph under edit on behalf of the pass `made_by`; `finish` returns it linted and recompiled."""

    def __init__(self, module: fx.GraphModule, made_by: str) -> None:
        self.module = clone(module)
        self.graph = self.module.graph
        self.made_by = made_by
        self.rewritten: list[str] = []
        self._taken = {display_name(node) for node in self.graph.nodes}
        self._identifiers = {node.name for node in self.graph.nodes}

    def find(self, target: Callable[..., Any]) -> list[fx.Node]:
        """Every call of this operator, in order."""
        return [node for node in self.graph.nodes if node.op == "call_function" and node.target is target]

    def results(self, node: fx.Node) -> dict[int, fx.Node]:
        """The taken-apart results of a tuple-valued call, by index."""
        return {user.args[1]: user for user in node.users if user.target is operator.getitem}  # type: ignore[misc]

    def call_before(self, anchor: fx.Node, name: str, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """A new call placed before `anchor`; its value is computed on the fake tensors of its arguments."""
        real_args, real_kwargs = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        with self._fake_mode():
            value = target(*real_args, **real_kwargs)
        name = unique_name(name, self._taken)
        with self.graph.inserting_before(anchor):
            node = self.graph.create_node(
                "call_function", target, args, kwargs, name=unique_name(identifier(name), self._identifiers)
            )
        node.meta["val"] = value
        facts(node).update(name=name, made_by=self.made_by)
        self.rewritten.append(name)
        return node

    def copy_before(self, anchor: fx.Node, node: fx.Node, name: str, env: dict[fx.Node, fx.Node]) -> fx.Node:
        """A duplicate of `node` before `anchor`, its arguments looked up in `env` where they are there."""
        name = unique_name(name, self._taken)
        with self.graph.inserting_before(anchor):
            new = self.graph.create_node(
                node.op,
                node.target,
                fx.map_arg(node.args, lambda n: env.get(n, n)),
                fx.map_arg(node.kwargs, lambda n: env.get(n, n)),
                name=unique_name(identifier(name), self._identifiers),
            )
        new.meta = {**node.meta, "custom": copy.deepcopy(facts(node))}
        facts(new).update(name=name, made_by=self.made_by)
        self.rewritten.append(name)
        return new

    def replace(self, node: fx.Node, by: fx.Node) -> None:
        """Every use of `node` becomes a use of `by`, and `node` goes."""
        self.rewritten.append(display_name(node))
        node.replace_all_uses_with(by)
        self.graph.erase_node(node)

    def resize_parameter(self, node: fx.Node, parameter: Parameter) -> None:
        """Makes the parameter that this `get_attr` reads the one given, of another shape."""
        *path, leaf = parameter.name.split(".")
        owner = self.module.get_submodule(".".join(path))
        data = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        setattr(owner, leaf, nn.Parameter(data) if parameter.trained else data)
        with self._fake_mode():
            node.meta["val"] = torch.empty(parameter.shape, dtype=parameter.dtype)
        self.module.meta["parameters"] = {**self.module.meta["parameters"], parameter.name: parameter}
        self.rewritten.append(display_name(node))

    def evaluate(self, node: fx.Node) -> None:
        """Records a call's value anew, after its arguments changed."""
        with self._fake_mode():
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]

    def evaluate_again(self) -> None:
        """Records every call's value anew, after arguments changed their shape."""
        for node in self.graph.nodes:
            if node.op == "call_function":
                self.evaluate(node)
        result = self.output_node()
        values: Any = result.args[0]
        result.meta["val"] = tuple(value.meta["val"] for value in values)

    def _fake_mode(self) -> Any:
        return next(n.meta["val"].fake_mode for n in self.graph.nodes if hasattr(n.meta.get("val"), "fake_mode"))

    def output_node(self) -> fx.Node:
        """The graph's output."""
        found: fx.Node = next(iter(self.graph.find_nodes(op="output")))
        return found

    def set_output(self, role: Role, name: str, node: fx.Node) -> None:
        """Adds an output port, or gives the port of that name this role and value."""
        result = self.output_node()
        values: list[Any] = list(result.args[0])  # type: ignore[arg-type]
        declared = [Port(*port) for port in self.module.meta["outputs"]]
        position = next((i for i, port in enumerate(declared) if port.name == name), len(declared))
        declared[position : position + 1] = [Port(role, name)]
        values[position : position + 1] = [node]
        result.args = (tuple(values),)
        result.meta["val"] = tuple(value.meta["val"] for value in values)
        self.module.meta["outputs"] = tuple(declared)

    def finish(self) -> fx.GraphModule:
        """The edited module."""
        self.graph.lint()
        self.module.recompile()
        return self.module
