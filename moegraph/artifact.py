"""A compiled directory: everything `compile` found out about a spec, as files people and programs can read.

    spec.yaml                       the resolved spec, every default written out
    report.json                     hash, time and nodes rewritten per pass, versions, sizes, what was verified
    graph.json                      the graphs before tracing and at the end, for programs
    passes/06-recompute/moe.joint.txt   the canonical text of each graph after the pass
    passes/06-recompute.diff            what the pass changed

Of one rank (`compile --rank`) it holds the kinds of block and the blocks of that rank's stages; hashes are those of the
whole program, so that they can be compared between ranks. The report lists each stage's collectives in order.

Contract: the directory is data. Nothing in it is ever executed: `train` reads its spec, compiles that again, and
refuses if a graph is not the one whose hash the report holds. Written aside and renamed, so it is whole or absent.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from hashlib import sha256
from itertools import zip_longest
from pathlib import Path
from typing import Any

from moegraph.artifact_names import GRAPH_NAME, PASSES_NAME, REPORT_NAME, SPEC_NAME
from moegraph.compiled import Compiled
from moegraph.compiled_folder import FORMAT, FORMAT_VERSION, CompiledFolder
from moegraph.data.output_folder import move_into_place
from moegraph.errors import CheckFailed, UsageError
from moegraph.graph.collectives import traffic
from moegraph.graph.diff import diff_lines, diff_programs
from moegraph.graph.instances import blocks_text
from moegraph.graph.program import Instance
from moegraph.graph.text import graph_json
from moegraph.passes.pipeline import PassRecord
from moegraph.runtime.accounting import count_parameters, flops_per_token
from moegraph.runtime.manifest import versions
from moegraph.specs.resolved import resolved_yaml
from moegraph.verify.structure import VERIFIERS

_OWN_NAMES = frozenset({SPEC_NAME, REPORT_NAME, GRAPH_NAME, PASSES_NAME})


def build_report(
    compiled: Compiled, *, pass_files: Mapping[str, list[str]] | None = None, verified: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """report.json as JSON-able values. `pass_files`: names of the passes that each user's file registered;
    `verified`: the numeric verification, where there was one."""
    layer_program = [record for record in compiled.records if record.level == "layer"][-1].program
    total, active = count_parameters(layer_program)
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "spec_sha256": sha256(resolved_yaml(compiled.spec).encode()).hexdigest(),
        "versions": versions(),
        "rank": compiled.rank,
        "world": compiled.spec.layout.world,
        "stages": [_stage_report(compiled, stage) for stage in compiled.stages],
        "parameters": {"total": total, "active": active},
        "flops_per_token": flops_per_token(compiled.spec, layer_program),
        "passes": [_pass_report(number, record, compiled.kinds) for number, record in enumerate(compiled.records)],
        "pass_files": dict(pass_files or {}),
        # Every record passed every structural verifier: one that fails ends the pipeline.
        "verifiers": {"structural": dict.fromkeys(VERIFIERS, "ok"), "numeric": verified},
        "notes": [],
    }


def _stage_report(compiled: Compiled, stage: int) -> dict[str, Any]:
    """The blocks of a stage, and its collectives for one micro-batch, in order."""
    blocks = [instance for instance in compiled.instances if instance.stage == stage]
    found = [each.to_json() for each in traffic(compiled.program, blocks)]
    return {"stage": stage, "blocks": [instance.prefix for instance in blocks], "collectives": found}


def _pass_report(number: int, record: PassRecord, kinds: Sequence[str]) -> dict[str, Any]:
    return {
        "number": number,
        "name": record.name,
        "level": record.level,
        "tier": record.tier,
        "seconds": round(record.seconds, 6),
        "rewritten": {kind: len(names) for kind, names in record.rewritten.items() if kind in kinds},
        "notes": {kind: note for kind, note in record.notes.items() if note and kind in kinds},
        "hash": record.hash,
    }


def build_graphs(compiled: Compiled) -> dict[str, Any]:
    """graph.json as JSON-able values: instances, parameters, and per kind its layer graph and its final graphs."""
    program = compiled.program
    layer_units = [record for record in compiled.records if record.level == "layer"][-1].program.units
    kinds = {
        kind: {name: graph_json(module) for name, module in {**layer_units[kind].graphs, **unit.graphs}.items()}
        for kind, unit in program.units.items()
        if kind in compiled.kinds
    }
    read = {name for instance in compiled.instances for name in instance.parameters.values()}
    instances = [
        {
            "prefix": instance.prefix,
            "kind": instance.kind,
            "layer": instance.layer,
            "stage": instance.stage,
            "parameters": dict(instance.parameters),
        }
        for instance in compiled.instances
    ]
    parameters = {
        name: {
            "shape": list(p.shape),
            "shards": p.shards,
            "role": p.role,
            "init": p.init,
            "std": p.std,
            "trained": p.trained,
        }
        for name, p in program.parameters.items()
        if name in read
    }
    return {"kinds": kinds, "instances": instances, "parameters": parameters}


def check_writable(folder: Path) -> None:
    """Raises UsageError unless `folder` is absent, empty, or a compiled directory and nothing else."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise UsageError(f"{folder} exists and is not a folder: name another one with -o")
    if not folder.is_dir():
        return
    names = sorted(entry.name for entry in folder.iterdir())
    foreign = [name for name in names if name not in _OWN_NAMES]
    if foreign or (names and REPORT_NAME not in names):
        raise UsageError(
            f"{folder} holds {(foreign or names)[0]!r} and is not a compiled directory, so it is not replaced: name "
            "another folder with -o"
        )


def write_compiled(folder: Path, compiled: Compiled, report: Mapping[str, Any]) -> None:
    """Writes the directory, replacing an older compiled directory. Raises UsageError if it may not or cannot."""
    check_writable(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.partial-", dir=folder.parent))
        try:
            partial.chmod(0o755)
            _fill(partial, compiled, report)
            move_into_place(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error.strerror or error}") from error


def _fill(folder: Path, compiled: Compiled, report: Mapping[str, Any]) -> None:
    (folder / SPEC_NAME).write_text(resolved_yaml(compiled.spec), encoding="utf-8")
    _write_json(folder / GRAPH_NAME, build_graphs(compiled), indent=None)
    before: PassRecord | None = None
    for number, record in enumerate(compiled.records):
        stem = folder / PASSES_NAME / f"{number:02d}-{record.name}"
        stem.mkdir(parents=True)
        for kind in compiled.kinds:
            for name, text in record.texts[kind].items():
                (stem / f"{kind}.{name}.txt").write_text(text + "\n", encoding="utf-8")
        if before is not None:
            lines = diff_of(before, record, compiled.instances)
            stem.with_name(f"{stem.name}.diff").write_text("\n".join(lines) + "\n", encoding="utf-8")
        before = record
    _write_json(folder / REPORT_NAME, report, indent=2)


def diff_of(before: PassRecord, after: PassRecord, instances: Sequence[Instance]) -> list[str]:
    """What a pass changed in these blocks, in lines."""
    kinds = [kind for kind in after.texts if any(instance.kind == kind for instance in instances)]
    titles = {kind: blocks_text(instance for instance in instances if instance.kind == kind) for kind in kinds}
    return list(diff_lines(diff_programs(before.texts, after.texts, (before.name, after.name), kinds), titles))


def _write_json(path: Path, data: Mapping[str, Any], indent: int | None) -> None:
    path.write_text(json.dumps(data, indent=indent, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")


def check_unchanged(folder: CompiledFolder, compiled: Compiled) -> None:
    """Raises CheckFailed naming the first pass whose graphs are not those the directory was compiled to."""
    for was, now in zip_longest(folder.hashes.items(), compiled.hashes.items()):
        if was == now:
            continue
        if was is None or now is None or was[0] != now[0]:
            name = was[0] if was else ""
            what = f"pass {name!r} ran when it was compiled" if was else "fewer passes ran when it was compiled"
            what += f", and in its place is {now[0]!r} now" if now else ", and does not now"
            if file := folder.user_passes.get(name):
                what += f" (it came from {file}: give --pass-file)"
        else:
            what = f"the graphs after pass {was[0]!r} are not those it was compiled to"
        raise CheckFailed(f"{folder.path}: {what}{_moved(folder)}; if that is right, compile the spec again")


def _moved(folder: CompiledFolder) -> str:
    """Which versions are others than when the directory was compiled."""
    here = versions()
    names = [name for name in here if folder.versions.get(name, here[name]) != here[name]]
    moved = ", ".join(f"{name} {folder.versions[name]} → {here[name]}" for name in names)
    return f" (changed since then: {moved})" if moved else ""
