"""The lines a run begins and ends with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from moegraph.graph.placement import num_stages
from moegraph.runtime.accounting import count_parameters
from moegraph.runtime.device import device_name
from moegraph.runtime.engine import Engine
from moegraph.runtime.low_precision import low_precision_text


def announce(engine: Engine, folder: Path, flops_per_token: float, note: Callable[[str], None]) -> None:
    """Says what model is trained, where, on what, and under which layout."""
    from moegraph.passes.balance_losses import definition

    spec, program = engine.spec, engine.program
    total, active = count_parameters(program)
    note(
        f"model: {total:,} parameters, {active:,} active, {flops_per_token / 1e9:.4g} GFLOP per token; "
        f"auxiliary: {definition(spec)}"
    )
    note(
        f"run: {folder}, {device_name(engine.device)}, compute {spec.precision.compute}, "
        f"{len(program.units)} kinds of block, {spec.train.compile}"
    )
    precision = low_precision_text(spec, engine.device)
    if precision is not None:
        note(precision)
    layout = spec.layout
    if layout.world > 1:
        sent = f", {layout.transport} transport" if layout.ep > 1 else ""
        stages = f", {layout.schedule} over {num_stages(layout)} stages" if layout.pp > 1 else ""
        note(f"layout: {layout.world} ranks = dp {layout.dp} × pp {layout.pp}, ep {layout.ep}{sent}{stages}")


def conclude(compilations: Mapping[str, int], folder: Path, note: Callable[[str], None]) -> None:
    """Says how often graphs were compiled, and where the results are."""
    compiled, most = len(compilations), max(compilations.values(), default=0)
    once = "each once" if most <= 1 else f"some {most} times"
    if compiled:
        note(f"compiled {compiled} graphs, {once}, however the routing moved")
    note(f"results: {folder}")
