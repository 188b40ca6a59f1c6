"""`verify`: each pass of a spec is proved, by running every kind of block before and after it on equal inputs.

Outputs and every gradient must be bitwise equal for an `exact` pass, within its bound for a `close` one; what a pass
adds is held against a float64 reference; and one wrong value is planted after each pass to show that it would be seen.
Blocks that talk to other ranks run on all ranks of a simulated expert group (`moegraph.verify.distributed`). Structural
verifiers run on the way (`moegraph.verify.structure`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from moegraph.errors import CheckFailed
from moegraph.graph.program import Program, Unit
from moegraph.lowering import lower
from moegraph.passes.cast_dispatch import CastDispatch
from moegraph.passes.cast_fp8 import CastFp8
from moegraph.passes.cast_mxfp8 import CastMxfp8
from moegraph.passes.dispatch_experts import DispatchExperts
from moegraph.passes.pipeline import PassRecord, run_pipeline
from moegraph.passes.save_mxfp8 import SaveMxfp8
from moegraph.specs.schema import Spec
from moegraph.verify.compare import signal_to_noise
from moegraph.verify.distributed import TIGHT, Trial, check_tight_buckets, execute_ranks, lost_rows, prepare
from moegraph.verify.layout import layout_text, with_world
from moegraph.verify.plant import plant_fault
from moegraph.verify.reduce import reduce_spec
from moegraph.verify.references import auxiliary_error
from moegraph.verify.run import Execution, deterministic_threads
from moegraph.verify.stages import StageProof, prove_stages
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
    """All verdicts; `reduced` says what was made smaller to run here, `layout` which layout was proved, and `stages`
    what was found about the collectives of its pipeline stages, where it has several ranks."""

    rows: list[PassVerdict]
    reduced: str
    structural: list[str] = field(default_factory=lambda: list(VERIFIERS))
    layout: str = ""
    stages: list[StageProof] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether everything held."""
        return all(row.ok for row in self.rows) and all(stage.ok for stage in self.stages)

    def to_json(self) -> dict[str, Any]:
        """The report as JSON-able data."""
        rows, stages = [asdict(row) for row in self.rows], [stage.to_json() for stage in self.stages]
        found = {"ok": self.ok, "reduced": self.reduced, "layout": self.layout, "stages": stages}
        return {**found, "structural": self.structural, "passes": rows}


def verify_spec(
    spec: Spec,
    *,
    seed: int = 0,
    plant: bool = True,
    world: int | None = None,
    progress: Callable[[str], None] | None = None,
) -> VerifyReport:
    """Runs the spec's pipeline, reduced to a size that runs here, and proves each of its passes.

    The layout is the spec's, with small groups of experts; with `world` it is one of that many ranks. Raises
    `CheckFailed` from a structural verifier; numeric breaches are in the report.
    """
    small, reduced = reduce_spec(spec) if world is None else reduce_spec(with_world(spec, world), most_ranks=world)
    records = run_pipeline(lower(small))
    rows = verify_records(records, seed=seed, plant=plant, progress=progress)
    stages = prove_stages(records[-1].program, seed) if small.layout.world > 1 else []
    return VerifyReport(rows, reduced, layout=layout_text(small.layout), stages=stages)


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
    tolerance = record.made_by.bound(before.spec.precision.compute) if record.made_by is not None else 0.0
    worst, first, problems, notes, seen = [0.0, 0.0], None, list[str](), list[str](), list[bool]()
    for kind, unit in before.units.items():
        new = record.program.units[kind]
        rewritten = record.rewritten.get(kind, ())
        try:
            trial = prepare(before, unit, new, seed)
            choosing = trial.expected if _moves_choices(record) else None
            found = execute_ranks(new, trial.inputs, choosing)
        except CheckFailed as error:
            problems.append(f"{kind}: {error}")
            continue
        difference = trial.difference(found, tolerance)
        worst = [max(worst[0], difference.outputs), max(worst[1], difference.gradients)]
        if not difference.within(tolerance):
            first = first or f"{kind}: {difference.first_node or ', '.join(difference.missing) or 'an output'}"
        problems += _references(record, new, found)
        if rewritten and isinstance(record.made_by, DispatchExperts):
            lost = sum(map(lost_rows, found))
            problems += [f"{kind}: {lost} rows did not fit into their buckets, which hold any routing"] if lost else []
            notes += _tight(record.made_by, before, unit, seed, problems)
        if rewritten and isinstance(record.made_by, (CastDispatch, CastFp8, CastMxfp8, SaveMxfp8)):
            notes.append(f"{kind}, SQNR against what was before: {signal_to_noise(trial.expected, found)}")
        if plant and (rewritten or record.made_by is None):
            seen += _planted(record, new, trial, tolerance, rewritten, choosing)
    problems += _silent(previous, record)
    planted = all(seen) if seen else None
    ok = first is None and not problems and planted is not False
    note = "; ".join(problems or notes) or _note(record)
    nodes = {kind: tuple(names) for kind, names in record.rewritten.items() if names}
    return PassVerdict(
        record.name, record.tier, tolerance, record.count, worst[0], worst[1], ok, note, first, planted, nodes
    )


def _tight(made_by: DispatchExperts, program: Program, unit: Unit, seed: int, problems: list[str]) -> list[str]:
    """Proves that what does not fit is counted; a note of how much that was. What is wrong goes to `problems`."""
    if made_by.transport == "exact":
        return ["exact: only rows that exist travel"]
    lost, wrong = check_tight_buckets(made_by, program, unit, seed)
    problems += wrong
    how = "are dropped" if made_by.drop else "do not fit"
    notes = ["direct runs as the exchange of buckets that it stands for"] if made_by.transport == "direct" else []
    return [*notes, f"{unit.kind}: every row fits; with buckets of {TIGHT} loads {lost} {how}, and all are counted"]


def _moves_choices(record: PassRecord) -> bool:
    """Whether a pass changes what the router reads by more than rounding. Nearly tied experts then change places, and
    another expert's output is no measure of the pass: the block after it runs with the choices of the one before."""
    return isinstance(record.made_by, CastMxfp8) and record.made_by.attention != "off"


def _planted(
    record: PassRecord,
    unit: Unit,
    trial: Trial,
    tolerance: float,
    rewritten: Any,
    choosing: Sequence[Execution] | None = None,
) -> list[bool]:
    planted = plant_fault(unit, rewritten, factor=max(1.0625, 1 + 8 * tolerance))  # larger than what a pass may change
    if planted is None:
        return []
    wrong, _ = planted
    found = execute_ranks(wrong, trial.inputs, choosing)
    return [not trial.difference(found, tolerance).within(tolerance) or bool(_references(record, wrong, found))]


def _references(record: PassRecord, unit: Unit, executions: Sequence[Execution]) -> list[str]:
    moe = record.program.spec.model.moe
    if record.level != "layer" or moe is None:
        return []
    errors = [auxiliary_error(unit.graphs["layer"], each.values, moe) for each in executions]
    error = max((each for each in errors if each is not None), default=0.0)
    if error <= REFERENCE_TOLERANCE:
        return []
    return [f"{unit.kind}: an auxiliary loss differs from its float64 reference by {error:.1e}"]


def _silent(before: PassRecord, record: PassRecord) -> list[str]:
    """What a pass did and what it says it did must agree, and one that rewrote nothing must say why, for every kind."""
    if record.made_by is None:
        return []
    problems = []
    for kind, texts in record.texts.items():
        blocks = [instance.prefix for instance in record.program.instances_of(kind)]
        moved = any(record.placement[prefix] != before.placement[prefix] for prefix in blocks)
        claimed, changed = bool(record.rewritten.get(kind)), texts != before.texts[kind] or moved
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
