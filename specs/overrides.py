"""`--set a.b.c=value`: one tree out of all overrides, to be laid over the spec.

The value is YAML by the same rules as in a file, lists and mappings in flow style included; what type it has to have is
the schema's business. A later override of a key replaces an earlier one.
"""

from __future__ import annotations

from collections.abc import Iterable

from moegraph.errors import Problem
from moegraph.specs.merge import overlay
from moegraph.specs.nodes import Limits, Mapping, Mark, Node, show_name
from moegraph.specs.yaml_reader import problem_at, read_yaml

SET = "--set"


def read_overrides(overrides: Iterable[str], problems: list[Problem], limits: Limits) -> Node | None:
    """The tree that the overrides make together, None if there is none; malformed ones are added to `problems`."""
    tree: Node | None = None
    for text in overrides:
        one = _read_one(text, problems, limits)
        if one is not None:
            tree = one if tree is None else overlay(tree, one)
    return tree


def _read_one(text: str, problems: list[Problem], limits: Limits) -> Node | None:
    path, equals, value = text.partition("=")
    keys = [key.strip() for key in path.split(".")]
    mark = Mark(f"{SET} {show_name(text)}", trusted=True)
    if not equals or not all(keys):
        fix = f"write {SET} section.key=value, for example {SET} train.steps=100"
        problems.append(problem_at(mark, "MG110", "an override needs a key, `=` and a value", fix=fix))
        return None
    if len(keys) > limits.depth:
        problems.append(problem_at(mark, "MG108", f"nested more than {limits.depth} levels deep"))
        return None
    if keys[0] == "extends":
        problems.append(problem_at(mark, "MG110", "`extends` can only stand in a file", path="extends"))
        return None
    node = read_yaml(value, mark.origin, problems, limits, in_file=False)
    for key in reversed(keys) if node is not None else ():
        assert node is not None
        node = Mapping({key: node}, mark, {key: mark}, node.size + 1)
    return node
