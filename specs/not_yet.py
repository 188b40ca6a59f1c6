"""What the schema can say and the program cannot do yet: one table, and the check that refuses it.

A spec that asks for any of this is refused when it is loaded. Removing a row is how a feature becomes available.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from moegraph.errors import Problem
from moegraph.specs.fields import walk
from moegraph.specs.nodes import Mapping, Node, Scalar, plain, show
from moegraph.specs.yaml_reader import problem_at


@dataclass(frozen=True, slots=True)
class NotYet:
    """`what` waits for later work: in any value but the default, or in those of `values` only."""

    what: str
    values: tuple[str, ...] = ()


NOT_YET: dict[str, NotYet] = {
    "model.norm.kind": NotYet("layer normalisation with a mean", ("layer",)),
    "model.norm.bias": NotYet("a bias in normalisation"),
    "model.attention.scale": NotYet("an attention scale other than head_dim^-1/2"),
    "model.attention.qk_norm": NotYet("query and key normalisation without a weight", ("l2",)),
    "model.attention.qk_norm_after_rope": NotYet("query and key normalisation after the rotation"),
    "model.attention.clip_qkv": NotYet("clipping of queries, keys and values"),
    "model.attention.output_gate": NotYet("a gate on the output of attention"),
    "model.attention.window.rope": NotYet("a rotary embedding of its own for windowed layers"),
    "model.attention.chunk": NotYet("chunked attention"),
    "model.attention.rope.pattern": NotYet("layers without rotary embedding among others with it"),
    "model.attention.rope.scaling": NotYet("RoPE scaling"),
    "model.attention.temperature": NotYet("a temperature that grows with the position"),
    "model.attention.sinks": NotYet("attention sinks"),
    "model.attention.mla": NotYet("multi-head latent attention (MLA)"),
    "model.attention.experts": NotYet("a mixture of attention heads"),
    "model.mixers": NotYet("layers with gated delta nets or short convolutions"),
    "model.head_bias": NotYet("a bias on the logits"),
    "model.multi_token_prediction": NotYet("multi-token prediction"),
    "model.moe.router.algorithm": NotYet("the sparsemixer router", ("sparsemixer",)),
    "model.moe.router.jitter": NotYet("noise on the router's input"),
}


def check_not_yet(tree: Mapping, problems: list[Problem]) -> None:
    """Add to `problems` whatever the tree asks for that waits for later work."""
    refused: list[Problem] = []
    defaults = {path: info.default for path, _, _, info in walk()}
    for path, row in NOT_YET.items():
        node = _at(tree, path)
        if node is None or not _asks_for(node, row, defaults[path]):
            continue
        default = "leave it out" if defaults[path] is None else f"leave it out, or use {show(defaults[path])}"
        value = show(plain(node))
        message = f"not supported yet, this waits for later work: {row.what}"
        refused.append(problem_at(node.mark, "MG107", message, path=path, value=value, fix=default))
    # Mistakes within what is refused as a whole would only distract.
    inside = tuple(f"{each.path}." for each in refused)
    problems[:] = [each for each in problems if not each.path.startswith(inside)] + refused


def _asks_for(node: Node, row: NotYet, default: Any) -> bool:
    if row.values:
        return any(word in row.values for word in _words(node))
    return bool(plain(node) != default)


def _words(node: Node) -> Iterator[Any]:
    """What may name a choice: the value itself, or the `kind` of a mapping."""
    kind = node.entries.get("kind") if isinstance(node, Mapping) else node
    if isinstance(kind, Scalar):
        yield kind.value


def _at(tree: Node, path: str) -> Node | None:
    node: Node | None = tree
    for key in path.split("."):
        node = node.entries.get(key) if isinstance(node, Mapping) else None
    return node
