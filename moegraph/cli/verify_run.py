"""`moegraph verify RUN`: the chain of a run is whole; with `--steps A:B` those steps are trained again and compared."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from moegraph.cli.options import load_pass_files
from moegraph.cli.output import print_json, say
from moegraph.cli.ranks import start_ranks, this_rank
from moegraph.errors import UsageError

DIFFERS = 3


def verify_run(
    run: Path, steps: str | None, overrides: Sequence[str], pass_files: list[Path], nproc: int | None, json: bool
) -> int:
    """0, or 3 naming the first step that differs. `steps` as A:B, both included; None checks the chain alone."""
    from moegraph.runtime.audit import read_chain

    if steps is None:
        lines = read_chain(run)
        last = lines[-1] if lines else {"step": 0, "digest": ""}
        if json:
            print_json({"run": str(run), "step": last["step"], "digest": last["digest"], "whole": True})
        else:
            print(f"{run}: the chain is whole up to step {last['step']}, digest {last['digest']}")
        return 0
    first, last_step = _range(steps)
    from moegraph.cli.sources import load_run

    spec = load_run(run, overrides)
    ranks = this_rank(spec.layout.world, nproc)
    if ranks is None:
        options = [f"--set={each}" for each in overrides] + [f"--pass-file={each}" for each in pass_files]
        return start_ranks(spec.layout.world, ["verify", str(run), f"--steps={steps}", *options, *["--json"] * json])
    from moegraph.runtime.progress import Progress
    from moegraph.runtime.replay import replay

    rank, world = ranks
    load_pass_files(pass_files)
    with ExitStack() as stack:
        shown = sys.stderr if rank == 0 else stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
        progress = Progress(spec.train.steps, spec.train.log_every, shown)
        found = replay(spec, run, (first, last_step), base=Path.cwd(), progress=progress, rank=rank, world=world)
    if rank == 0 and json:
        print_json({"run": str(run), **found.to_json()})
    if rank == 0 and found.differs is not None:
        say(f"error: step {found.differs} is the first that differs: {found.difference}")
    elif rank == 0 and not json:
        print(f"{run}: steps {first} to {last_step} are the same, trained again after step {found.start}")
    return 0 if found.differs is None else DIFFERS


def _range(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([0-9]{1,9})(?::([0-9]{1,9}))?", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2] or match[1]):
        raise UsageError(f"--steps {text}: write A:B with 1 <= A <= B, such as 5:8")
    return int(match[1]), int(match[2] or match[1])
