"""Blocks of one kind, for people: their names in short, and a graph with the names of one of them written out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import fx

from moegraph.graph.edit import clone
from moegraph.graph.names import display_name, facts
from moegraph.graph.program import Instance, Program


def instances_text(program: Program, kind: str) -> str:
    """`layers.1 … layers.3, layers.5`: the blocks of one kind."""
    return blocks_text(program.instances_of(kind))


def blocks_text(instances: Iterable[Instance]) -> str:
    """`embedding, layers.0 … layers.3`: some blocks, neighbouring layers in one."""
    runs: list[list[Instance]] = []
    for instance in instances:
        last = runs[-1][-1].layer if runs else None
        if last is not None and instance.layer == last + 1:
            runs[-1].append(instance)
        else:
            runs.append([instance])
    return ", ".join(_run_text(run) for run in runs)


def _run_text(run: Sequence[Instance]) -> str:
    names = [instance.prefix for instance in run]
    return f"{names[0]} … {names[-1]}" if len(names) > 2 else ", ".join(names)


def expanded(module: fx.GraphModule, instance: Instance) -> fx.GraphModule:
    """The graph with full names: `moe.route` of layers.3 becomes `layers.3.moe.route`, and a parameter gets its name
    in the model (a tied head then shows whose weight it reads)."""
    twin = clone(module)
    for node in twin.graph.nodes:
        name = display_name(node)
        facts(node)["name"] = instance.parameters.get(name, f"{instance.prefix}.{name}")
    return twin
