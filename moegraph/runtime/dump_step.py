"""What it takes to find where a step stopped being finite: the step again, on each rank, node by node.

    RUN/non_finite/step-000004/rank-00001.json
    step, rank, numbers, samples (of each micro-batch of this rank), first (the node, or null),
    parameters and gradients that hold something infinite or NaN, with how many elements

`first` is the first node whose output holds NaN or +inf, in the order in which this rank runs; a parameter that does is
the node that brings it in. -inf does not count, since masks are made of it; what comes of it does. Everything runs
eagerly under the run's own layout, so all ranks take part: collective. The gradient buffers are used up by it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from moegraph.data.loader import StepBatch
from moegraph.graph.names import display_name
from moegraph.graph.program import Port
from moegraph.runtime.engine import Engine
from moegraph.runtime.start import together
from moegraph.runtime.step import StepComputer
from moegraph.runtime.watched import Call, WatchedExecutor, has_no_value

FOLDER = "non_finite"


def dump_step(engine: Engine, step: int, batch: StepBatch, record: Mapping[str, Any], run_folder: Path) -> str:
    """Writes this rank's file and returns a clause that names the first node found here. Collective."""
    parameters = _lost(engine.state.values)
    gradients = _lost(engine.gradients.shard)
    for buffer in engine.gradients.values():
        buffer.zero_()
    first = _First()
    executor = WatchedExecutor(engine, first.see)
    StepComputer(engine.spec, executor, engine.gradients, engine.device, engine.mesh).compute(batch)
    mesh, count = engine.mesh, engine.spec.layout.microbatches
    shares = [batch.microbatch(mesh.dp_rank, mesh.dp, index=i, count=count) for i in range(count)]
    content = {
        "step": step,
        "rank": mesh.rank,
        "numbers": {name: _said(value) for name, value in record.items() if isinstance(value, float)},
        "samples": [share["sample_ids"].tolist() for share in shares],
        "first": first.found,
        "parameters": parameters,
        "gradients": gradients,
    }
    path = run_folder / FOLDER / f"step-{step:06d}" / f"rank-{mesh.rank:05d}.json"
    with together(mesh, "writing what was found"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return _clause(first.found, mesh.rank, path.parent)


def _clause(first: Mapping[str, Any] | None, rank: int, folder: Path) -> str:
    if first is None:
        return f"every node on rank {rank} is finite when it is run by itself; see {folder}"
    where = f"{first['parameter'] or first['node']} in {first['block']} ({first['graph']})"
    return f"on rank {rank} the first that is not finite is {where}; see {folder}"


class _First:
    """Keeps what is the first that is not finite."""

    def __init__(self) -> None:
        self.found: dict[str, Any] | None = None

    def see(self, call: Call, node: fx.Node, port: Port | None, values: Sequence[Tensor]) -> None:
        """Keeps the node if it is the first whose output holds NaN or +inf. `port`: of an input of the graph."""
        if self.found is not None or has_no_value(node):
            return
        for value in values:
            bad = ~(torch.isfinite(value) | torch.isneginf(value)) if value.is_floating_point() else None
            if bad is None or not bool(bad.any()):
                continue
            at = bad.nonzero()[0].tolist()
            self.found = {
                "block": call.instance.prefix,
                "graph": call.label,
                "node": display_name(node),
                "operator": str(node.target),
                "parameter": call.instance.parameters.get(port.name) if port is not None else None,
                "dtype": str(value.dtype).removeprefix("torch."),
                "shape": list(value.shape),
                "not_finite": int(bad.sum()),
                "at": at,
                "value": _said(float(value[tuple(at)])),
            }
            return


def _lost(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """How many elements of each tensor are not finite, where there are any."""
    counts = {name: int((~torch.isfinite(value)).sum()) for name, value in tensors.items() if value.is_floating_point()}
    return {name: count for name, count in counts.items() if count}


def _said(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
