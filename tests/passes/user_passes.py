"""Passes that tests register, and a registry that is as before afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import fx

from moegraph import ops
from moegraph.graph.edit import Rewriter
from moegraph.graph.program import Unit
from moegraph.passes import Pass, PassContext, PassResult, registry

USER_FILE = '''
from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from moegraph import ops
from moegraph.graph.edit import Rewriter
from moegraph.passes import Pass, PassResult, registry


@registry.register
@dataclass(frozen=True)
class ScaleExperts(Pass):
    """Multiplies the experts' output."""

    factor: float = 1.0
    times: int = 1
    mode: Literal["all", "none"] = "all"

    name: ClassVar[str] = "scale-experts"
    level: ClassVar[str] = "layer"

    def apply(self, unit, context):
        rewriter = Rewriter(unit.graphs["layer"], self.name)
        combined = rewriter.find(ops.combine)
        if self.mode == "none" or not combined:
            return PassResult(unit, note="no experts in this block")
        (node,) = combined
        for _ in range(self.times):
            users = list(node.users)
            new = rewriter.call_before(node.next, "moe.scaled", ops.scale, node, self.factor)
            for user in users:
                user.replace_input_with(node, new)
            node = new
        return PassResult(unit.with_graphs({"layer": rewriter.finish()}), rewriter.rewritten)
'''


@contextmanager
def restored_registry() -> Iterator[None]:
    """Afterwards the registry holds what it held."""
    before = dict(registry._passes), dict(registry._loaded)
    try:
        yield
    finally:
        registry._passes, registry._loaded = before


def write_user_file(folder: Path, name: str = "mine.py", text: str = USER_FILE) -> Path:
    """A Python file that registers `scale-experts`."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def pass_class(name: str, level: str = "layer", apply: Callable[..., Any] | None = None, **declared: Any) -> type[Pass]:
    """A pass class of this name; `apply(rewriter, unit, context)` edits one graph, or nothing is rewritten."""

    def run(self: Pass, unit: Unit, context: PassContext) -> PassResult:
        if apply is None:
            return PassResult(unit, note="nothing to do")
        graph = "layer" if self.level == "layer" else "joint"
        rewriter = Rewriter(unit.graphs[graph], self.name)
        apply(rewriter, unit, context)
        if not rewriter.rewritten:
            return PassResult(unit, note="nothing to do")
        return PassResult(unit.with_graphs({graph: rewriter.finish()}), rewriter.rewritten)

    body: dict[str, Any] = {"name": name, "level": level, "apply": run, "__annotations__": {}}
    for key in ("requires", "provides", "removes", "conflicts"):
        body[key] = frozenset(declared.pop(key, ()))
    body |= {"__annotations__": {"name": ClassVar[str], "level": ClassVar[str]}, **declared}
    return dataclass(frozen=True)(type("Made", (Pass,), body))


def insert_after(rewriter: Rewriter, node: fx.Node, name: str, target: Callable[..., Any], *args: Any) -> fx.Node:
    """`target(node, *args)` between a node and its users."""
    users = list(node.users)
    new = rewriter.call_before(node.next, name, target, node, *args)
    for user in users:
        user.replace_input_with(node, new)
    return new


def scale_experts(factor: float) -> Callable[..., None]:
    """An edit that multiplies the experts' output."""

    def apply(rewriter: Rewriter, unit: Unit, context: PassContext) -> None:
        for node in rewriter.find(ops.combine):
            insert_after(rewriter, node, "moe.scaled", ops.scale, factor)

    return apply
