"""Cross-field rules: what no single value says.

    tree, Spec with holes ─▶ every rule of RULES ─▶ problems

Contract: a rule is a small function `(spec, report)` that reads what it needs from the spec and reports what
contradicts. It may read anything: where a value did not parse, reading it ends the rule quietly, since that problem is
reported already. Rules never depend on one another. They live in `rules_*.py`; RULES is the whole list.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moegraph.errors import Problem
from moegraph.specs.nodes import Mapping, Mark, Node, Sequence, plain, show
from moegraph.specs.schema.spec import Spec
from moegraph.specs.yaml_reader import problem_at


@dataclass(frozen=True, slots=True)
class Report:
    """Where a rule says what it found, and looks up what was written (`spec` has defaults filled in)."""

    tree: Mapping
    problems: list[Problem]

    def add(
        self, path: str, message: str, *, code: str = "MG106", allowed: str | None = None, fix: str | None = None
    ) -> None:
        """Report a problem with the value at `path`; if it is a default, at the section it belongs to."""
        node, whole = self._find(path)
        value = show(plain(node)) if whole and not isinstance(node, Mapping) else None
        mark = node.mark
        if whole and isinstance(node, Mapping):
            parent, _ = self._find(path.rpartition(".")[0])
            mark = parent.keys.get(path.rpartition(".")[2], mark) if isinstance(parent, Mapping) else mark
        self.problems.append(problem_at(mark, code, message, path=path, value=value, allowed=allowed, fix=fix))

    def written(self, path: str) -> bool:
        """Whether the value at `path` was written rather than a default."""
        return self._find(path)[1]

    def mark(self, path: str) -> Mark:
        """Where the value at `path`, or the section it is missing from, stands."""
        return self._find(path)[0].mark

    def _find(self, path: str) -> tuple[Node, bool]:
        node: Node = self.tree
        for key in path.replace("[", ".").replace("]", "").split(".") if path else ():
            if isinstance(node, Mapping) and key in node.entries:
                node = node.entries[key]
            elif isinstance(node, Sequence) and key.isdigit() and int(key) < len(node.items):
                node = node.items[int(key)]
            else:
                return node, False
        return node, True


Rule = Callable[[Spec, Report], None]


def check_rules(tree: Mapping, spec: Spec, whole: bool, problems: list[Problem]) -> None:
    """Add what the rules find to `problems`. `whole` says that the spec has no holes."""
    report = Report(tree, problems)
    for rule in all_rules():
        run_rule(rule, spec, report, whole)


def run_rule(rule: Rule, spec: Spec, report: Report, whole: bool) -> None:
    """One rule; in a spec with holes, one that reads a hole ends there."""
    try:
        rule(spec, report)
    except AttributeError:
        if whole:
            raise


def all_rules() -> tuple[Rule, ...]:
    """Every rule, in the order in which they run."""
    from moegraph.specs import rules_layout, rules_model, rules_moe, rules_precision, rules_run

    return (*rules_model.RULES, *rules_moe.RULES, *rules_layout.RULES, *rules_run.RULES, *rules_precision.RULES)


def listing(values: Any, limit: int = 16) -> str:
    """Some values for a sentence: "1, 2, 4"."""
    items = [str(value) for value in values]
    return ", ".join(items[:limit]) + (", …" if len(items) > limit else "")


def divisors(number: int) -> list[int]:
    """The divisors of a number, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})
