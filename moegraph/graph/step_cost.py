"""How long an optimizer step takes on a machine, predicted from the graphs and the layout before anything is run.

A rank computes each of its blocks forward and backward once per micro-batch, adds the gradients that the graphs return
to their buffers, prepares weights once per step, and then updates what it holds of the optimizer's state. Reductions of
gradients run beside the last backward and are not counted; gathers of weights behind the optimizer are. No pipelines:
their idle time is `moegraph inspect --schedule`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from moegraph.errors import UsageError
from moegraph.graph.kernel_cost import CLASSES, Kernel, Rows, kernels_of
from moegraph.graph.machine import LINK, MACHINES, MEMORY
from moegraph.graph.program import Program, ports, results

_WIDTH = {"bf16": 2, "fp32": 4, "fp64": 8}


@dataclass(frozen=True)
class StepCost:
    """Predicted seconds of one rank: `blocks` by kind of block and graph and class of kernel for one block and one
    micro-batch (`prepare` once per step), and of a whole step."""

    machine: str
    blocks: Mapping[tuple[str, str], Mapping[str, float]]
    counts: Mapping[str, int]
    compute: float
    optimizer: float
    tokens: int

    @property
    def seconds(self) -> float:
        """Of one optimizer step."""
        return self.compute + self.optimizer

    @property
    def tokens_per_second(self) -> float:
        """Of one device."""
        return self.tokens / self.seconds

    def to_json(self) -> dict[str, Any]:
        """As JSON-able data, times in seconds."""
        return {
            "machine": self.machine,
            "blocks": [
                {"kind": kind, "graph": graph, "blocks": self.counts[kind], "seconds": dict(found)}
                for (kind, graph), found in self.blocks.items()
            ],
            "compute_seconds": self.compute,
            "optimizer_seconds": self.optimizer,
            "step_seconds": self.seconds,
            "tokens_per_second_per_device": self.tokens_per_second,
        }


def predict_step(program: Program, machine: str) -> StepCost:
    """The predicted step of a compiled program on a machine of `MACHINES`.

    Raises UsageError for a machine without figures, for pipelines and for a dtype that the machine has no peak for.
    """
    spec = program.spec
    if machine not in MACHINES:
        raise UsageError(f"no figures for {machine!r}: there are {', '.join(MACHINES)}")
    chip = MACHINES[machine]
    if spec.layout.pp > 1:
        raise UsageError("a step is predicted for pp 1 only: `inspect --schedule` shows what a pipeline leaves idle")
    if spec.precision.compute not in chip.peaks:
        raise UsageError(f"{machine} has no figures for products in {spec.precision.compute}: take bf16 or fp32")
    tokens = spec.sequences_per_microbatch * spec.data.seq_len
    rows = Rows(tokens * (spec.model.moe.top_k if spec.model.moe else 0), spec.layout.ep)
    blocks: dict[tuple[str, str], dict[str, float]] = {}
    counts = {kind: len(program.instances_of(kind)) for kind in program.units}
    compute = 0.0
    for kind, unit in program.units.items():
        for graph in ("forward", "backward", "prepare"):
            if graph not in unit.graphs:
                continue
            found = by_class(kernels_of(unit.graphs[graph], chip, rows))
            if graph == "backward":
                found["other"] += _adding_seconds(unit.graphs[graph], program, machine)
            blocks[kind, graph] = found
            times = 1 if graph == "prepare" else spec.layout.microbatches
            compute += sum(found.values()) * counts[kind] * times
    optimizer = _optimizer_seconds(program, machine)
    return StepCost(machine, blocks, counts, compute, optimizer, tokens * spec.layout.microbatches)


def by_class(kernels: list[Kernel]) -> dict[str, float]:
    """Seconds of each class of kernel."""
    return {kind: sum(kernel.seconds for kernel in kernels if kernel.kind == kind) for kind in CLASSES}


def _adding_seconds(backward: fx.GraphModule, program: Program, machine: str) -> float:
    """Adding the gradients that a graph returns to their buffers, for a micro-batch; the first are only written."""
    master, rounds = _master_width(program), program.spec.layout.microbatches
    moved = 0.0
    for port, node in zip(ports(backward, "outputs"), results(backward), strict=True):
        if port.role == "grad":
            gradient = node.meta["val"]
            moved += gradient.numel() * (gradient.element_size() + master * (2 - 1 / rounds))
    return moved / (MEMORY * MACHINES[machine].memory)


def _master_width(program: Program) -> int:
    return _WIDTH["fp64" if program.spec.precision.compute == "fp64" else "fp32"]


def _optimizer_seconds(program: Program, machine: str) -> float:
    """Norm, AdamW and the weights in compute dtype: gradients read twice, master and moments read and written."""
    spec, chip = program.spec, MACHINES[machine]
    dense_ranks, expert_ranks = spec.layout.dp, spec.layout.dp // spec.layout.ep
    master = _master_width(program)
    moments = 2 if spec.train.optimizer.moments == "bf16" else master
    width, moved, gathered = _WIDTH[spec.precision.compute], 0.0, 0.0
    for parameter in program.trained():
        own = parameter.numel / parameter.shards  # on one rank of the expert group
        sharers = expert_ranks if parameter.experts else dense_ranks
        moved += own / sharers * (2 * master + 2 * master + 4 * moments) + own * width
        gathered += own * width * (sharers - 1) / sharers
    return moved / (MEMORY * chip.memory) + gathered / (LINK * chip.link)
