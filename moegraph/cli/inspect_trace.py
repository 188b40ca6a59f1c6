"""`moegraph inspect RUN --trace-hash [OTHER]`: the digest of every value of a step, or the first that differs."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moegraph.cli.options import load_pass_files
from moegraph.cli.output import print_json, print_table, say
from moegraph.cli.rank_environment import LAUNCHED, environment_ranks
from moegraph.cli.ranks import start_ranks, this_rank
from moegraph.cli.sources import is_run, load_run
from moegraph.errors import CheckFailed, RunError, UsageError

if TYPE_CHECKING:
    from moegraph.runtime.trace_compare import Comparison, Value
    from moegraph.runtime.trace_file import Trace
    from moegraph.specs import Spec

DIFFERS = 3


@dataclass(frozen=True)
class Request:
    """What to trace: `step` None is the first in which two chains differ, else the last that there is."""

    step: int | None = None
    overrides: Sequence[str] = ()
    pass_files: Sequence[Path] = ()
    nproc: int | None = None


def inspect_trace(run: Path, other: Path | None, request: Request, save: Path | None, *, as_json: bool) -> int:
    """Traces `run` (or reads the trace file that it names) and prints or saves it. With `other` it compares: 0 where
    every value is equal, 3 naming the first that is not."""
    if other is not None and save is not None:
        raise UsageError("--save goes with one run: it writes its trace, to compare another one with later")
    ranks = environment_ranks()
    if ranks is not None and ranks[1] > 1 and save is None:
        raise UsageError("under torchrun, trace each run with --save FILE, and compare the files without torchrun")
    step = request.step if request.step is not None else _choose_step(run, other)
    trace = _trace(run, step, request)
    if trace is None:
        return 0  # another rank has it
    if save is not None:
        from moegraph.runtime.trace_file import write_trace

        write_trace(trace, save)
        if LAUNCHED not in os.environ:
            say(f"{save}: {trace.nodes:,} values of step {trace.step}")
        return 0
    if other is None:
        _print_trace(trace, as_json=as_json)
        return 0
    against = _trace(other, step, request)
    assert against is not None
    from moegraph.runtime.trace_compare import compare

    found = compare(trace, against)
    status = _print_comparison(trace, against, found, as_json=as_json)
    if found.first is None and _chains_differ(run, other, step):
        say(
            f"their chains differ at step {step}, and this replay does not: what made them differ is in neither spec, "
            "code, data nor checkpoint, but in the device, the versions, or a fault of the machine"
        )
    return status


def _chains_differ(run: Path, other: Path, step: int) -> bool:
    from moegraph.runtime.audit import first_difference, read_chain

    if run.is_file() or other.is_file():
        return False
    try:
        lines = [next((line for line in read_chain(each) if line["step"] == step), {}) for each in (run, other)]
    except (CheckFailed, UsageError):  # without a whole chain there is nothing to hold it against
        return False
    return all(lines) and first_difference(lines[0], lines[1]) is not None


def _choose_step(run: Path, other: Path | None) -> int:
    """The first step in which the chains differ, or the last that all have; that of a trace file where there is one."""
    from moegraph.runtime.audit import first_difference, read_chain
    from moegraph.runtime.trace_file import read_trace

    for path in (run, other):
        if path is not None and path.is_file():
            return read_trace(path).step
    chains = [{line["step"]: line for line in read_chain(each) if "loss" in line} for each in (run, other) if each]
    both = sorted(set.intersection(*(set(chain) for chain in chains)))
    if not both:
        raise UsageError(f"{run}{f' and {other}' if other else ''} have no step in their chain that could be traced")
    differing = (step for step in both if first_difference(chains[0][step], chains[-1][step]) is not None)
    return int(next(differing, both[-1]))


def _trace(source: Path, step: int, request: Request) -> Trace | None:
    """The trace that a file has, or of a run's step; None on a rank other than the first."""
    from moegraph.runtime.trace_file import read_trace

    if source.is_file():
        trace = read_trace(source)
        if trace.step != step:
            raise UsageError(f"{source} is the trace of step {trace.step}, not of step {step}")
        return trace
    if not is_run(source):
        raise UsageError(f"{source} is neither the folder of a run nor a trace")
    spec = load_run(source, request.overrides)
    if not 1 <= step <= spec.train.steps:
        raise UsageError(f"--step {step}: {source} has steps 1 to {spec.train.steps}")
    ranks = this_rank(spec.layout.world, request.nproc)
    return _start(source, spec, step, request) if ranks is None else _run(source, spec, step, request, ranks)


def _start(source: Path, spec: Spec, step: int, request: Request) -> Trace:
    """Traces a run of several ranks, each a process of its own."""
    from moegraph.runtime.trace_file import read_trace

    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "trace.json"
        options = [f"--set={each}" for each in request.overrides] + [f"--pass-file={e}" for e in request.pass_files]
        command = ["inspect", str(source), "--trace-hash", f"--step={step}", f"--save={file}", *options]
        if start_ranks(spec.layout.world, command):
            raise RunError(f"{source} could not be traced: its ranks say why")
        return read_trace(file)


def _run(source: Path, spec: Spec, step: int, request: Request, ranks: tuple[int, int]) -> Trace | None:
    from moegraph.runtime.progress import Progress
    from moegraph.runtime.trace import trace_step

    load_pass_files(list(request.pass_files))
    rank, world = ranks
    with ExitStack() as stack:
        shown = sys.stderr if rank == 0 else stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
        progress = Progress(spec.train.steps, spec.train.log_every, shown)
        return trace_step(spec, source, step, base=Path.cwd(), progress=progress, rank=rank, world=world)


def _print_trace(trace: Trace, *, as_json: bool) -> None:
    if as_json:
        print_json(trace.model_dump(mode="json"))
        return
    from moegraph.runtime.trace_compare import values_of

    say(f"step {trace.step} of {trace.run}, loss {trace.loss}, gradient norm {trace.grad_norm}")
    columns = [">rank", ">micro-batch", "block", "graph", "node", "value", "made by", "digest"]
    print_table(columns, (_row(value) for value in values_of(trace)))


def _row(value: Value) -> Sequence[object]:
    key, node = value.key, value.node
    number = key.microbatch if key.microbatch >= 0 else "-"
    shown = (node.value, node.made_by) if node is not None else ("", "")
    return (key.rank, number, key.block or "-", key.graph, value.parameter or key.name, *shown, value.digest)


def _print_comparison(a: Trace, b: Trace, found: Comparison, *, as_json: bool) -> int:
    runs = {"runs": [a.run, b.run], "step": a.step, "equal": found.first is None}
    if as_json:
        print_json({**runs, **found.to_json()})
    for line in _about(a, b, found) if not as_json else ():
        print(line)
    if found.first is None:
        return 0
    mine, other = found.first
    say(f"error: step {a.step}: the first value that differs is {mine.sentence}")
    if a.step > 1 and (mine.parameter is not None or mine.key.graph == "moment"):
        say(f"    it differed before this step: look at --step {a.step - 1}")
    if mine.node is not None and other.node is not None and mine.node != other.node:
        for trace, node in ((a, mine.node), (b, other.node)):
            say(f"    {trace.run}: {node.value} = {node.operation}  # {node.made_by}")
    return DIFFERS


def _about(a: Trace, b: Trace, found: Comparison) -> Iterable[str]:
    yield f"step {a.step}: {a.run} from its step {a.start}, {b.run} from its step {b.start}"
    yield f"{found.compared:,} values compared, {found.differing:,} differ"
    for trace, count, first in zip((a, b), found.only, found.only_first, strict=True):
        if first is not None:
            yield f"{count:,} are of {trace.run} only, first {first.sentence}"
    if a.data != b.data:
        yield "the data are not the same (by their fingerprint)"
    for name, change in (("device", (a.device, b.device)), *_versions(a, b)):
        if change[0] != change[1]:
            yield f"{name}: {change[0]} and {change[1]}"
    for line in found.specs:
        if not line.startswith(("train.output_dir:", "checkpoint.")):
            yield f"spec {line}"
    if found.first is None:
        yield "equal: every value that both have is the same to the bit"


def _versions(a: Trace, b: Trace) -> Iterable[tuple[str, tuple[str, str]]]:
    for name in dict.fromkeys([*a.versions, *b.versions]):
        yield name, (a.versions.get(name, "none"), b.versions.get(name, "none"))
