"""Loading a spec: read, extend, override, validate, check.

    file or dict ─▶ tree with marks ─extends─▶ ─--set─▶ one tree ─schema─▶ Spec with holes ─rules─▶ Spec

Contract: either a whole, frozen `Spec` comes back, or one `SpecError` with everything that is wrong. Nothing is
accepted and ignored, nothing is evaluated, and no network and no environment variable is read. Neither torch nor numpy
is imported.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from collections.abc import Mapping as AbstractMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moegraph.errors import Problem, SpecError
from moegraph.specs.derived import fill_derived
from moegraph.specs.merge import overlay
from moegraph.specs.nodes import Limits, Mapping, Mark, from_python, show_name
from moegraph.specs.not_yet import check_not_yet
from moegraph.specs.overrides import read_overrides
from moegraph.specs.resolved import origins_of
from moegraph.specs.rules import check_rules
from moegraph.specs.schema.spec import Spec
from moegraph.specs.sources import Sources
from moegraph.specs.validate import Parsed, parse_spec
from moegraph.specs.yaml_reader import problem_at

LIMITS = Limits()
SpecSource = str | os.PathLike[str] | AbstractMapping[str, Any]


@dataclass(frozen=True, slots=True)
class ResolvedSpec:
    """A Spec and where each of its values comes from.

    `origins` maps the spec path of every final value (`model.moe.top_k`) to `file:line:column`, `--set key=value`,
    `default`, or `argument` for what was given as a Python mapping; `sources` are the files read, the one asked for
    first.
    """

    spec: Spec
    origins: dict[str, str]
    sources: tuple[str, ...]

    @property
    def source(self) -> str:
        """The spec that was asked for."""
        return self.sources[0] if self.sources else "argument"


def load_spec(source: SpecSource, overrides: Iterable[str] = (), *, trusted: bool = False) -> Spec:
    """The Spec in a file, a shipped preset (`presets/tiny.yaml`) or a mapping, with `a.b=c` overrides applied.

    A spec file is data from anywhere: the folders it names (data.source, train.output_dir) must lie below the working
    directory. Overrides and mappings come from the person running moegraph and may name any, and so may a file that is
    `trusted`, such as a resolved spec that moegraph wrote itself. Raises SpecError with all problems at once.
    """
    return load_resolved(source, overrides, trusted=trusted).spec


def load_resolved(source: SpecSource, overrides: Iterable[str] = (), *, trusted: bool = False) -> ResolvedSpec:
    """Like `load_spec`, and also says where every value comes from."""
    problems: list[Problem] = []
    sources = Sources(problems, LIMITS, trusted)
    name = "the given mapping" if isinstance(source, AbstractMapping) else show_name(os.fspath(source))
    tree = _read(source, sources, problems)
    over = read_overrides([overrides] if isinstance(overrides, str) else overrides, problems, LIMITS)
    if tree is None:
        raise SpecError(problems, name)
    merged = overlay(tree, over) if over is not None else tree
    assert isinstance(merged, Mapping)
    if merged.size > LIMITS.nodes:
        raise SpecError([*problems, problem_at(merged.mark, "MG108", f"more than {LIMITS.nodes:,} values")], name)
    merged = fill_derived(merged)
    parsed = parse_spec(merged)
    # What is missing may stand in a file that could not be read.
    problems += [each for each in parsed.problems if each.code != "MG104" or not sources.incomplete]
    check_not_yet(merged, problems)
    check_rules(merged, parsed.spec, parsed.whole, problems)
    if problems:
        raise SpecError(_in_order(problems, sources.files), name)
    spec = _build(parsed)
    return ResolvedSpec(spec, origins_of(spec, merged), tuple(sources.files))


def _read(source: SpecSource, sources: Sources, problems: list[Problem]) -> Mapping | None:
    if not isinstance(source, AbstractMapping):
        return sources.read(os.fspath(source))
    node = from_python(source, Mark("argument", trusted=True), problems, LIMITS)
    return sources.extend(node, Path()) if isinstance(node, Mapping) else None


def _build(parsed: Parsed) -> Spec:
    """The Spec once more through pydantic as a whole, which so has the last word."""
    return Spec.model_validate_json(json.dumps(parsed.data), strict=True)


def _in_order(problems: list[Problem], files: list[str]) -> list[Problem]:
    """As they stand in the files, each once; a value that could not be read is not also of the wrong kind."""
    rank = {file: index for index, file in enumerate(files)}
    kept: list[Problem] = []
    places: set[tuple[str, str]] = set()
    for problem in dict.fromkeys(problems):
        place = (problem.where, "" if problem.line else problem.path)
        if problem.code != "MG105" or place not in places:
            kept.append(problem)
        places.add(place)
    return sorted(kept, key=lambda each: (rank.get(each.file, len(rank)), each.line, each.column))


__all__ = ["LIMITS", "ResolvedSpec", "SpecSource", "load_resolved", "load_spec"]
