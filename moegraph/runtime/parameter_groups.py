"""Which learning-rate scale and weight decay each parameter trains with.

The rules of `train.optimizer.groups` are shell patterns (`*`, `?`, `[…]`, where `*` crosses dots) on the dotted names
of the model. The last rule that matches a parameter holds whole; what it leaves out is the optimizer's value. A rule
that matches no trained parameter is a mistake, and refused.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from moegraph.errors import Problem, SpecError
from moegraph.graph.program import Parameter
from moegraph.specs.schema import ParameterGroup


@dataclass(frozen=True)
class GroupValues:
    """What a parameter trains with: its learning rate is `lr_scale` times the schedule's."""

    lr_scale: float
    weight_decay: float


def parameter_groups(
    parameters: Mapping[str, Parameter], groups: Sequence[ParameterGroup], weight_decay: float
) -> dict[str, GroupValues]:
    """The values of every trained parameter, in the order of the model.

    Raises `SpecError`, naming every rule that matches no trained parameter and the names nearest to it.
    """
    names = [name for name, parameter in parameters.items() if parameter.trained]
    found = dict.fromkeys(names, GroupValues(1.0, weight_decay))
    problems: list[Problem] = []
    for index, group in enumerate(groups):
        matched = [name for name in names if fnmatchcase(name, group.match)]
        decay = weight_decay if group.weight_decay is None else group.weight_decay
        found.update(dict.fromkeys(matched, GroupValues(group.lr_scale, decay)))
        if not matched:
            problems.append(_no_match(index, group.match, parameters, names))
    if problems:
        raise SpecError(problems)
    return found


def _no_match(index: int, pattern: str, parameters: Mapping[str, Parameter], names: Sequence[str]) -> Problem:
    untrained = [name for name in parameters if name not in set(names) and fnmatchcase(name, pattern)]
    near = _near(pattern, names)
    message = "this pattern matches no trained parameter"
    if untrained:
        message += f" ({untrained[0]} is moved by its own rule, not by the optimizer)"
    return Problem(
        "MG106",
        message,
        path=f"train.optimizer.groups[{index}].match",
        value=f'"{pattern}"',
        allowed="patterns that match a name, such as " + ", ".join(near),
        nearest=near[0],
        fix="write the pattern with a name of the model in it, or remove the rule",
    )


def _near(pattern: str, names: Sequence[str]) -> list[str]:
    """Up to three patterns that do match, most like this one first; the layers' numbers are left open."""
    open_names = list(dict.fromkeys(re.sub(r"\d+", "*", name) for name in names))
    endings = {
        ".".join(parts[i:]): name for name in open_names for parts in [name.split(".")] for i in range(len(parts))
    }
    word = pattern.strip("*.") or pattern
    close = difflib.get_close_matches(word, [*open_names, *endings], n=6, cutoff=0.3)
    found = [each if each in open_names else f"*{each}" for each in close if each.strip("*.")]
    return (list(dict.fromkeys(found)) or open_names)[:3]
