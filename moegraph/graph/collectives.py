"""Which collectives a graph issues, and those of a pipeline stage: what every rank of a group must do in one order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from torch import fx

from moegraph.graph.effects import is_communication
from moegraph.graph.names import display_name, target_name
from moegraph.graph.program import Instance, Program


@dataclass(frozen=True)
class Collective:
    """One collective of a graph: the node that starts it, its operator, and the group it is over."""

    node: str
    operator: str
    group: str

    @property
    def host_waits(self) -> bool:
        """Whether its sizes are read by the host."""
        return "exact_exchange" in self.operator


def collectives(module: fx.GraphModule) -> list[Collective]:
    """The collectives that a graph issues, in order; waiting for one is not one."""
    return [
        Collective(display_name(node), target_name(node), str(node.args[-1]))
        for node in module.graph.nodes
        if is_communication(node) and not _is_wait(node)
    ]


def is_unfinished(node: fx.Node) -> bool:
    """Whether the node only starts a collective: its value is not there before another node has waited for it."""
    return is_communication(node) and not _is_wait(node) and not target_name(node).startswith("moegraph.")


def _is_wait(node: fx.Node) -> bool:
    return target_name(node).rsplit(".", 1)[-1] in ("all_to_all_wait", "wait_tensor")


@dataclass(frozen=True)
class Traffic:
    """The collectives that some blocks issue over one group for one micro-batch, by full names."""

    group: str
    forward: tuple[Collective, ...]
    backward: tuple[Collective, ...]

    @property
    def host_waits(self) -> int:
        """How often the host waits for sizes."""
        return sum(each.host_waits for each in (*self.forward, *self.backward))

    def to_json(self) -> dict[str, Any]:
        """The sequences as JSON-able values."""
        sides = {"forward": self.forward, "backward": self.backward}
        return {"group": self.group, **{side: [asdict(each) for each in found] for side, found in sides.items()}}


def traffic(program: Program, instances: Iterable[Instance]) -> list[Traffic]:
    """What blocks of a finished program issue, by group: block by block forward, and in reverse order backward."""
    blocks = list(instances)
    forward = [each for block in blocks for each in _named(program, block, "forward")]
    backward = [each for block in reversed(blocks) for each in _named(program, block, "backward")]
    return [
        Traffic(group, tuple(c for c in forward if c.group == group), tuple(c for c in backward if c.group == group))
        for group in dict.fromkeys(each.group for each in (*forward, *backward))
    ]


def _named(program: Program, block: Instance, graph: str) -> list[Collective]:
    found = collectives(program.units[block.kind].graphs[graph])
    return [Collective(f"{block.prefix}.{each.node}", each.operator, each.group) for each in found]
