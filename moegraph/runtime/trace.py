"""A digest of every value of one step: what two runs are compared by, node for node.

    calls       in the order of a rank: of which micro-batch, block and graph, and a digest per node of that graph
    moments     of the optimizer, of each parameter, as the step found them
    gradients   of each parameter, reduced over its replicas, as far as the rank keeps them
    weights     of each parameter and selection bias, as the graphs read them after the step

A digest is the first 16 hex digits of the SHA-256 of dtype, shape and bytes. Nodes run one by one, eagerly, so it is
the arithmetic of the graphs and of their operators that is traced; what Inductor fuses, it rounds otherwise. A node
that reserves memory or only starts a collective, and a gradient buffer before it is added to, hold no value yet and
have no digest.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from moegraph.compiled import Compiled
from moegraph.graph.names import display_name, facts
from moegraph.graph.program import Port
from moegraph.graph.text import operation_text, value_text
from moegraph.runtime.agree import Agreed
from moegraph.runtime.device import device_name
from moegraph.runtime.gather import gather_bytes
from moegraph.runtime.learning_rate import learning_rate
from moegraph.runtime.manifest import versions
from moegraph.runtime.progress import Progress
from moegraph.runtime.replay import trainer_before
from moegraph.runtime.step import StepComputer
from moegraph.runtime.step_policy import not_finite
from moegraph.runtime.trace_file import (
    DIGITS,
    FORMAT,
    NONE,
    VERSION,
    Block,
    GraphCall,
    Node,
    RankTrace,
    Trace,
    rank_from_bytes,
    rank_to_bytes,
)
from moegraph.runtime.trainer import Trainer
from moegraph.runtime.watched import Call, WatchedExecutor, has_no_value
from moegraph.specs.schema import Spec


def trace_step(
    spec: Spec,
    run: Path,
    step: int,
    *,
    base: Path,
    progress: Progress,
    compiled: Compiled | None = None,
    rank: int = 0,
    world: int = 1,
) -> Trace | None:
    """Trains the run in the folder `run` from its newest checkpoint before `step`, or from its start, up to that step,
    as one rank, and gives the trace of it on rank 0, None elsewhere. Writes nothing into the run's folder. Collective.
    """
    with trainer_before(spec, run, step, base=base, progress=progress, compiled=compiled, rank=rank, world=world) as (
        trainer,
        start,
    ):
        for earlier in range(start + 1, step):
            progress.show(trainer.step(earlier))
        mine, agreed = _traced(trainer, step)
        every = gather_bytes(rank_to_bytes(mine), trainer.mesh)
        if rank != 0:
            return None
        return Trace(
            format=FORMAT,
            version=VERSION,
            run=str(run),
            start=start,
            step=step,
            loss=agreed.loss if math.isfinite(agreed.loss) else None,
            grad_norm=agreed.norm if math.isfinite(agreed.norm) else None,
            data=trainer.dataset.fingerprint,
            device=device_name(trainer.device),
            versions=versions(),
            spec=trainer.spec.model_dump(mode="json", by_alias=True),
            blocks=[Block(prefix=i.prefix, parameters=dict(i.parameters)) for i in trainer.program.instances],
            ranks=[rank_from_bytes(content) for content in every],
        )


def _traced(trainer: Trainer, step: int) -> tuple[RankTrace, Agreed]:
    engine = trainer.engine
    batch = trainer.loader.step(step - 1)
    while True:
        digests = _Digests(trainer)
        executor = WatchedExecutor(engine, digests.see)
        computed = StepComputer(engine.spec, executor, engine.gradients, engine.device, engine.mesh).compute(batch)
        agreed = engine.agree(computed)
        if agreed.overflow == 0:
            break
        engine.raise_capacity(f"{agreed.overflow} rows found no place")
    optimizer = engine.state.optimizer
    moments = {
        f"{kind}.{name}": digest_of([value])
        for kind, tensors in (("exp_avg", optimizer.exp_avg), ("exp_avg_sq", optimizer.exp_avg_sq))
        for name, value in tensors.items()
    }
    gradients = {name: digest_of([value]) for name, value in engine.gradients.shard.items()}
    record = {"step": step, **agreed.numbers()}
    if not_finite(record) is None and trainer.policy.why_skip(record) is None:
        train = trainer.spec.train
        engine.commit(agreed, learning_rate(step, train.steps, train.schedule, train.optimizer.lr))
    weights = {name: digest_of([value]) for name, value in engine.state.values.items()}
    mine = RankTrace(graphs=digests.graphs, calls=digests.calls, moments=moments, gradients=gradients, weights=weights)
    return mine, agreed


class _Digests:
    """Watches a step."""

    def __init__(self, trainer: Trainer) -> None:
        self._places = {each.prefix: place for place, each in enumerate(trainer.program.instances)}
        self._units = trainer.program.units
        self._made_by: dict[str, dict[str, str]] = {}  # by kind and layer node
        self._current: Call | None = None
        self.graphs: dict[str, list[Node]] = {}
        self.calls: list[GraphCall] = []

    def see(self, call: Call, node: fx.Node, port: Port | None, values: Sequence[Tensor]) -> None:
        """One node's values."""
        if call is not self._current:
            self._current = call
            place = self._places[call.instance.prefix]
            entry = GraphCall(microbatch=call.microbatch, place=place, kind=call.kind, graph=call.graph, digests="")
            self.calls.append(entry)
        entry = self.calls[-1]
        nodes = self.graphs.setdefault(call.label, [])
        if len(entry.digests) == DIGITS * len(nodes):  # the first call of this graph
            nodes.append(_describe(node, port, self._makers(call.kind)))
        stale = has_no_value(node) or (port is not None and port.role in ("gradient_buffer", "keep"))
        entry.digests += NONE if stale else digest_of(values)

    def _makers(self, kind: str) -> dict[str, str]:
        if kind not in self._made_by:
            nodes = self._units[kind].layer_graph.graph.nodes
            self._made_by[kind] = {display_name(node): str(facts(node).get("made_by", "")) for node in nodes}
        return self._made_by[kind]


def digest_of(values: Sequence[Tensor]) -> str:
    """Of tensors on any device."""
    digest = hashlib.sha256()
    for value in values:
        digest.update(f"{value.dtype} {list(value.shape)}\n".encode())
        flat = value.detach().cpu().reshape(-1)
        if flat.numel() == 1:  # may have any stride, with which it cannot be viewed as bytes
            flat = flat.clone().as_strided((1,), (1,))
        content: Any = flat.contiguous().view(torch.uint8).numpy()
        digest.update(memoryview(content))
    return digest.hexdigest()[:DIGITS]


def _describe(node: fx.Node, port: Port | None, layer_made_by: Mapping[str, str]) -> Node:
    known = facts(node)
    layer, made_by = str(known.get("layer", "")), str(known.get("made_by", ""))
    if made_by == "trace":  # of whatever pass made the layer node
        made_by = layer_made_by.get(layer, made_by)
    return Node(
        name=display_name(node),
        operation=operation_text(node),
        value=value_text(node.meta.get("val")),
        layer=layer,
        direction=str(known.get("direction", "")),
        made_by=made_by,
        parameter=port.name if port is not None and port.role in ("parameter", "buffer", "prepared") else None,
    )
