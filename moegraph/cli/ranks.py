"""Commands that run as the ranks of a layout: the environment says which rank this is, or they are started."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from moegraph.cli.launch import launch
from moegraph.cli.rank_environment import LAUNCHED, environment_ranks, watch_launcher
from moegraph.errors import UsageError


def this_rank(world: int, nproc: int | None) -> tuple[int, int] | None:
    """(rank, world) of this process, or None where `nproc` processes are to be started for a layout of `world` ranks.

    Raises UsageError where the numbers do not fit.
    """
    ranks = environment_ranks()
    if LAUNCHED in os.environ:
        watch_launcher()
    if ranks is not None:
        if nproc is not None:
            raise UsageError("--nproc starts processes, but RANK and WORLD_SIZE are set: this is one of them already")
        return ranks
    if world == 1:
        if nproc not in (None, 1):
            raise UsageError(f"--nproc {nproc}, but the layout has one rank: raise layout.dp or layout.pp")
        return 0, 1
    if nproc != world:
        how = "no --nproc is given" if nproc is None else f"--nproc is {nproc}"
        raise UsageError(
            f"the layout has {world} ranks and {how}: --nproc {world} starts them on this host; on several hosts, "
            "torchrun starts the same command with `-m moegraph`"
        )
    return None


def start_ranks(world: int, arguments: Sequence[str], save_seconds: float | None = None) -> int:
    """Runs `moegraph ARGUMENTS` as `world` processes; the exit status. `save_seconds`: what they have after SIGTERM."""
    debug = ["--debug"] * ("--debug" in sys.argv)
    return launch([sys.executable, "-m", "moegraph", *arguments, *debug], world, save_seconds=save_seconds)
