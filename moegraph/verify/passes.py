"""`verify`: each pass of a spec is proved, by running every kind of block before and after it on equal inputs.

Outputs and every gradient must be bitwise equal for an `exact` pass, within its bound for a `close` one; what a pass
adds is held against a float64 reference; and one wrong value is planted after each pass to show that it would be seen.
Structural verifiers run on the way (`moegraph.verify.structure`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from moegraph.graph.program import Unit
from moegraph.lowering import lower
from moegraph.passes.pipeline import PassRecord, run_pipeline
from moegraph.specs.schema import Spec
from moegraph.verify.compare import Difference, compare
from moegraph.verify.inputs import random_inputs
from moegraph.verify.plant import plant_fault
from moegraph.verify.reduce import reduce_spec
from moegraph.verify.references import auxiliary_error
from moegraph.verify.run import Execution, deterministic_threads, execute
from moegraph.verify.structure import VERIFIERS

REFERENCE_TOLERANCE = 1e-5  # fp32 scalar against float64


@dataclass(frozen=True)
class PassVerdict:
    """What was found about one pass. Differences are relative and the largest over all kinds of block; `nodes` names
    the rewritten nodes by kind of block, `rewritten` counts them."""

    name: str
    tier: str
    tolerance: float
    rewritten: int
    output_difference: float
    gradient_difference: float
    ok: bool
    note: str
    first_difference: str | None
    planted_found: bool | None
    nodes: Mapping[str, Sequence[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class VerifyReport:
    """All verdicts; `reduced` says what was made smaller to run here."""

    rows: list[PassVerdict]
    reduced: str
    structural: list[str] = field(default_factory=lambda: list(VERIFIERS))

    @property
    def ok(self) -> bool:
        """Whether everything held."""
        return all(row.ok for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """The report as JSON-able data."""
        rows = [asdict(row) for row in self.rows]
        return {"ok": self.ok, "reduced": self.reduced, "structural": self.structural, "passes": rows}


def verify_spec(
    spec: Spec, *, seed: int = 0, plant: bool = True, progress: Callable[[str], None] | None = None
) -> VerifyReport:
    """Runs the spec's pipeline, reduced to a size that runs here, and proves each of its passes.

    Raises `CheckFailed` from a structural verifier; numeric breaches are in the report.
    """
    small, reduced = reduce_spec(spec)
    records = run_pipeline(lower(small))
    return VerifyReport(verify_records(records, seed=seed, plant=plant, progress=progress), reduced)


def verify_records(
    records: list[PassRecord], *, seed: int = 0, plant: bool = True, progress: Callable[[str], None] | None = None
) -> list[PassVerdict]:
    """Verdicts on a pipeline that ran; each record after the first is compared with the one before it."""
    report = progress or (lambda name: None)
    verdicts = []
    with deterministic_threads():
        for before, after in pairwise(records):
            report(after.name)
            verdicts.append(_verdict(before, after, seed, plant))
    return verdicts


def _verdict(previous: PassRecord, record: PassRecord, seed: int, plant: bool) -> PassVerdict:
    before = previous.program
    tolerance = record.made_by.tolerance if record.made_by is not None else 0.0
    worst, first, problems, seen = [0.0, 0.0], None, list[str](), list[bool]()
    for kind, unit in before.units.items():
        new = record.program.units[kind]
        inputs = random_inputs(before, unit.layer_graph, seed)
        expected = execute(unit, inputs)
        found = execute(new, inputs)
        difference = compare(expected, found, tolerance)
        worst = [max(worst[0], difference.outputs), max(worst[1], difference.gradients)]
        if not difference.within(tolerance):
            first = first or f"{kind}: {difference.first_node or ', '.join(difference.missing) or 'an output'}"
        problems += _references(record, new, found)
        rewritten = record.rewritten.get(kind, ())
        if plant and (rewritten or record.made_by is None):
            seen += _planted(record, new, expected, inputs, tolerance, rewritten)
    problems += _silent(previous, record)
    planted = all(seen) if seen else None
    ok = first is None and not problems and planted is not False
    note = "; ".join(problems) or _note(record)
    nodes = {kind: tuple(names) for kind, names in record.rewritten.items() if names}
    return PassVerdict(
        record.name, record.tier, tolerance, record.count, worst[0], worst[1], ok, note, first, planted, nodes
    )


def _planted(
    record: PassRecord, unit: Unit, expected: Execution, inputs: Any, tolerance: float, rewritten: Any
) -> list[bool]:
    planted = plant_fault(unit, rewritten)
    if planted is None:
        return []
    wrong, _ = planted
    found = execute(wrong, inputs)
    difference: Difference = compare(expected, found, tolerance)
    return [not difference.within(tolerance) or bool(_references(record, wrong, found))]


def _references(record: PassRecord, unit: Unit, execution: Execution) -> list[str]:
    moe = record.program.spec.model.moe
    if record.level != "layer" or moe is None:
        return []
    error = auxiliary_error(unit.graphs["layer"], execution.values, moe)
    if error is None or error <= REFERENCE_TOLERANCE:
        return []
    return [f"{unit.kind}: an auxiliary loss differs from its float64 reference by {error:.1e}"]


def _silent(before: PassRecord, record: PassRecord) -> list[str]:
    """What a pass did and what it says it did must agree, and one that rewrote nothing must say why, for every kind."""
    if record.made_by is None:
        return []
    problems = []
    for kind, texts in record.texts.items():
        claimed, changed = bool(record.rewritten.get(kind)), texts != before.texts[kind]
        if claimed != changed:
            how = "changed, but no rewritten node is named" if changed else "as it was, but rewritten nodes are named"
            problems.append(f"{record.name}: {kind} is {how}")
        elif not record.count and not record.notes.get(kind):
            problems.append(f"{record.name} rewrote nothing in {kind} and does not say why")
    return problems


def _note(record: PassRecord) -> str:
    if record.count or record.made_by is None:
        return ""
    return "nothing to rewrite: " + "; ".join(dict.fromkeys(record.notes.values()))
