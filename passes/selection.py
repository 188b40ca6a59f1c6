"""Which passes a spec asks for, and their order.

Layer passes come first; `requires`, `removes`, `conflicts` and the spec's `after` are edges of a graph, and the order
is its topological one, registration order breaking ties.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import networkx as nx

from moegraph.errors import UsageError
from moegraph.passes.contract import Pass
from moegraph.passes.registry import registry
from moegraph.specs.schema import Spec
from moegraph.specs.suggest import nearest_word

TRACE = "trace"
PROVIDED_BY_TRACING = frozenset({"joint"})


def passes_for(spec: Spec) -> list[Pass]:
    """The passes the spec asks for, configured and in an order that honours every contract."""
    _check_custom(spec)
    enabled = [p for p in (pass_class.from_spec(spec) for pass_class in registry) if p is not None]
    custom = spec.passes.custom
    enabled = [p for p in enabled if p.name not in custom or custom[p.name].enabled]
    return order_passes(enabled, {name: o.after for name, o in custom.items() if o.enabled and o.after is not None})


def order_passes(passes: Sequence[Pass], after: Mapping[str, str] | None = None) -> list[Pass]:
    """Passes sorted so that layer passes come first, contracts are met and `after` (name → the pass it follows) holds;
    registration order breaks ties. Raises `UsageError` naming the pass and what it lacks, or the cycle."""
    by_name = {p.name: p for p in passes}
    if len(by_name) != len(passes):
        twice = next(p.name for i, p in enumerate(passes) if p.name in {other.name for other in passes[:i]})
        raise UsageError(f"pass {twice!r} is listed twice")
    graph = nx.DiGraph()
    graph.add_nodes_from(by_name)
    for p in passes:
        _check_provided(p, passes)
        graph.add_edges_from((p.name, other.name) for other in passes if _runs_before(p, other))
    for name, before in (after or {}).items():
        if before not in by_name:
            near = nearest_word(before, by_name)
            hint = f"; did you mean {near!r}?" if near else f" (enabled: {', '.join(by_name)})"
            raise UsageError(f"pass {name!r} is to run after {before!r}, which is not enabled{hint}")
        if name in by_name:
            graph.add_edge(before, name)
    rank = {p.name: i for i, p in enumerate(passes)}
    try:
        names = list(nx.lexicographical_topological_sort(graph, key=rank.__getitem__))
    except nx.NetworkXUnfeasible:
        cycle = [edge[0] for edge in nx.find_cycle(graph)]
        raise UsageError(f"the passes' contracts contradict each other: {' -> '.join([*cycle, cycle[0]])}") from None
    return [by_name[name] for name in names]


def _runs_before(p: Pass, other: Pass) -> bool:
    """Whether a contract says that `p` comes before `other`."""
    if p is other:
        return bool(p.requires & p.provides or p.conflicts & p.provides)
    if p.level == "layer" and other.level == "step":
        return True
    return bool(p.provides & other.requires or p.requires & other.removes or p.conflicts & other.provides)


def _check_provided(p: Pass, passes: Iterable[Pass]) -> None:
    """Raises `UsageError` when no enabled pass provides what `p` requires."""
    if p.level == "layer" and p.requires & PROVIDED_BY_TRACING:
        raise UsageError(f"pass {p.name!r} works on layer graphs and requires the joint graph, which comes after them")
    missing = p.requires - PROVIDED_BY_TRACING.union(*(other.provides for other in passes))
    if not missing:
        return
    off = [other.name for other in registry if other.provides & missing]
    hint = f" (switched off: {', '.join(off)})" if off else ""
    raise UsageError(f"pass {p.name!r} requires {', '.join(sorted(missing))}, which no enabled pass provides{hint}")


def _check_custom(spec: Spec) -> None:
    """`passes.custom` is for users' passes, and those have to be registered."""
    for name, options in spec.passes.custom.items():
        if name not in registry:
            near = nearest_word(name, registry.names())
            known = f"did you mean {near!r}?" if near else f"known: {', '.join(registry.names())}"
            fix = "load its file with --pass-file"
            raise UsageError(f"passes.custom.{name}: no such pass is registered ({known}); {fix}")
        if registry.is_built_in(name) and (options.options or not options.enabled):
            where = f"its settings stand in passes.{name}" if name in _sections(spec) else "it always runs"
            message = f"{name} comes with moegraph, and {where}; here only `after` may be given"
            raise UsageError(f"passes.custom.{name}: {message}")


def _sections(spec: Spec) -> set[str]:
    fields = type(spec.passes).model_fields
    return {field.alias or name for name, field in fields.items()}
