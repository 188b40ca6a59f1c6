"""One rank of a training run: compiled graphs, the model's state, and a step from its batch to the commit.

    compute -> agree -> (overflow: raise the capacity and compute again) -> commit

Where the buckets of dispatched rows have a fixed capacity, a step that overflows one anywhere in the world has changed
nothing yet. With `layout.overflow: replay` all ranks go up the ladder of capacities together and compute the step
again, so that no token is lost; a rung is compiled once, and a run never goes down.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from moegraph.compiled import Compiled, compile
from moegraph.data.loader import StepBatch
from moegraph.errors import RunError
from moegraph.graph.placement import stages_of_rank
from moegraph.graph.program import Program, ports
from moegraph.runtime.agree import Agreed, agree
from moegraph.runtime.collectives import during
from moegraph.runtime.computed import Computed
from moegraph.runtime.executor import Executor
from moegraph.runtime.gradient_norm import sum_of_squares
from moegraph.runtime.gradients import GradientBuffers
from moegraph.runtime.mesh import SINGLE, Mesh
from moegraph.runtime.model_state import ModelState, master_dtype
from moegraph.runtime.signals import Signals
from moegraph.runtime.step import StepComputer
from moegraph.specs.schema import Spec

Overlap = Literal["off", "on", "on, 2 chunks"]  # what runs while rows travel
_MEASURED = 3  # compute phases of each kind that `decide_overlap` times


def capacity_ladder(spec: Spec) -> list[float]:
    """Capacities of a bucket in balanced loads: the spec's, then powers of two, up to `ep`, where everything fits."""
    layout = spec.layout
    if layout.ep == 1 or layout.transport == "exact":
        return [layout.capacity]
    rungs, rung = [layout.capacity], 2.0
    while rungs[-1] < layout.ep and layout.overflow == "replay":
        if rung > rungs[-1]:
            rungs.append(min(rung, float(layout.ep)))
        rung *= 2
    return rungs


class Engine:
    """What one rank holds from the first step to the last. `note` is told about a raised capacity."""

    def __init__(
        self,
        spec: Spec,
        device: torch.device,
        mesh: Mesh = SINGLE,
        compiled: Compiled | None = None,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.spec, self.device, self.mesh, self.note = spec, device, mesh, note
        self.compiled = compiled or compile(spec)
        self.program = self.compiled.program
        self.stages = stages_of_rank(spec.layout, mesh.pp_rank)
        mine = [each for each in self.program.instances if each.stage in self.stages]
        names = list(dict.fromkeys(name for each in mine for name in each.parameters.values()))
        self.state = ModelState(spec, self.program, device, mesh, names)
        self.gradients = GradientBuffers(
            [self.program.parameters[n] for n in names if self.program.parameters[n].trained],
            master_dtype(spec),
            device,
            mesh,
            tied=self.state.tied,
        )
        self.moe_blocks = moe_blocks(self.program)
        self.ladder = capacity_ladder(spec)
        self.rung = 0
        self.replays = 0
        self.overlap = _overlap_of(spec)
        self.signals = Signals()
        self.before_commit: Callable[[], None] = lambda: None  # whoever still reads the state has it wait for that
        self.overlap_seconds: dict[str, float] = {}  # of a compute phase, where several ways were measured
        self._built: dict[tuple[int, Overlap], tuple[Executor, StepComputer]] = {}
        self._use(0)

    @property
    def executor(self) -> Executor:
        """The bound graphs at the present capacity."""
        return self._built[self.rung, self.overlap][0]

    @property
    def computer(self) -> StepComputer:
        """The compute phase at the present capacity."""
        return self._built[self.rung, self.overlap][1]

    @property
    def capacity(self) -> float | None:
        """Of a bucket of dispatched rows, in balanced loads; None where buckets hold anything."""
        padded = self.spec.layout.ep > 1 and self.spec.layout.transport != "exact"
        return self.ladder[self.rung] if padded else None

    def compute(self, batch: StepBatch) -> Agreed:
        """The gradients of a step, reduced, and its numbers over all ranks. Changes nothing but buffers."""
        while True:
            with during("exchanging rows or hidden states"):
                computed = self.computer.compute(batch)
            agreed = self.agree(computed)
            if agreed.overflow == 0:
                return agreed
            self.raise_capacity(f"{agreed.overflow} rows found no place")

    def agree(self, computed: Computed) -> Agreed:
        """The numbers of a computed step over all ranks, read by the host once."""
        experts = self.spec.model.moe.num_experts if self.spec.model.moe is not None else 0
        with during("adding up the step's numbers"):
            squares = sum_of_squares(self.gradients.shard).to(self.device)
            return agree(computed, squares, self.moe_blocks, experts, self.mesh, self.signals.requests)

    def commit(self, agreed: Agreed, lr: float) -> None:
        """Moves parameters, moments and biases by the step that was computed."""
        self.before_commit()
        with during("gathering parameters"):
            self.state.commit(self.gradients, agreed.norm, lr, agreed.counts_on_device)
        for executor, _ in self._built.values():
            executor.weights_changed()

    def evaluate(self, batches: Sequence[StepBatch]) -> float:
        """The mean cross entropy per valid target over these batches of one micro-batch each, shared out over `dp`."""
        targets = sum(batch.valid_targets for batch in batches)
        dp = self.mesh.dp
        rounds = -(-len(batches) // dp)
        mine: list[StepBatch | None] = list(batches[self.mesh.dp_rank :: dp])
        mine += [None] * (rounds - len(mine))
        while True:
            with during("exchanging rows or hidden states of validation"):
                loss, overflow = self.computer.evaluate(mine, targets, batches[0].microbatch())
                numbers = torch.stack([loss, overflow])
                if self.mesh.world > 1:
                    dist.all_reduce(numbers)
            mean, lost = numbers.tolist()
            if not lost:
                return float(mean)
            self.raise_capacity(f"{int(lost)} rows of validation found no place")

    def compilations(self) -> dict[str, int]:
        """How often each graph that was used has been compiled, at each capacity."""
        found: dict[str, int] = {}
        for (rung, overlap), (executor, _) in self._built.items():
            suffix = f" at capacity {self.ladder[rung]:g}" if rung else ""
            suffix += f" with overlap {overlap}" if overlap != "off" else ""
            found.update({f"{label}{suffix}": count for label, count in executor.compilations().items()})
        return found

    def raise_capacity(self, what: str) -> None:
        """The next rung, on every rank. Raises RunError with `overflow: error`."""
        here = f"{what} at capacity {self.ladder[self.rung]:g}"
        if self.spec.layout.overflow == "error":
            raise RunError(f"{here}, and layout.overflow is error: raise layout.capacity, or use replay")
        self._use(self.rung + 1)
        self.replays += 1
        self.note(f"{here}: computed again at {self.ladder[self.rung]:g}")

    def decide_overlap(self, batch: StepBatch) -> None:
        """With `overlap-communication: {mode: auto}`, measures the compute phase each way on a batch and keeps the
        fastest one, the same on all ranks. Changes nothing but buffers."""
        option = self.spec.passes.overlap_communication
        if option.mode != "auto":
            return
        tried: list[Overlap] = ["off", "on", "on, 2 chunks"]
        if option.chunks is not None or self.spec.layout.transport != "padded":
            tried.remove("on" if option.chunks == 2 else "on, 2 chunks")
        while not self.overlap_seconds:
            rung = self.rung
            found: dict[str, float] = {overlap: self._slowest(overlap, batch) for overlap in tried}
            if self.rung == rung:  # else they were not measured at one capacity
                self.overlap_seconds.update(found)
        self.overlap = min(tried, key=lambda each: self.overlap_seconds[each])
        self._use(self.rung)
        measured = "; ".join(f"{name}: {1e3 * seconds:.1f} ms" for name, seconds in self.overlap_seconds.items())
        self.note(f"overlap-communication, a step's forward and backward: {measured}; chosen: {self.overlap}")

    def _slowest(self, overlap: Overlap, batch: StepBatch) -> float:
        """Seconds of the compute phase on the slowest rank, a median."""
        self.overlap = overlap
        self._use(self.rung)
        self.compute(batch)  # compiles, and raises the capacity where it has to be
        seconds = statistics.median(self._timed(batch) for _ in range(_MEASURED))
        slowest = torch.tensor(seconds, dtype=torch.float64, device=self.device)
        if self.mesh.world > 1:
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return float(slowest)

    def _timed(self, batch: StepBatch) -> float:
        _synchronize(self.device)
        began = time.perf_counter()
        self.computer.compute(batch)
        _synchronize(self.device)
        return time.perf_counter() - began

    def start_at_capacity(self, capacity: float) -> None:
        """A run that is continued begins with the buckets that it had at the end, or the next larger ones."""
        if self.capacity is not None:
            self._use(next((i for i, rung in enumerate(self.ladder) if rung >= capacity), len(self.ladder) - 1))

    def _use(self, rung: int) -> None:
        if (rung, self.overlap) not in self._built:
            program = self.program
            if rung or self.overlap != _overlap_of(self.spec):
                program = compile(variant(self.spec, self.ladder[rung], self.overlap)).program
            executor = Executor(program, self.state.values, self.device, self.spec.train.compile, self.stages)
            computer = StepComputer(self.spec, executor, self.gradients, self.device, self.mesh)
            self._built[rung, self.overlap] = (executor, computer)
        self.rung = rung


def variant(spec: Spec, capacity: float, overlap: Overlap) -> Spec:
    """The spec at another capacity of its buckets, with or without overlapped communication."""
    layout = spec.layout.model_copy(update={"capacity": capacity})
    how = {"mode": "off" if overlap == "off" else "on", "chunks": 2 if overlap == "on, 2 chunks" else None}
    option = spec.passes.overlap_communication.model_copy(update=how)
    passes = spec.passes.model_copy(update={"overlap_communication": option})
    return spec.model_copy(update={"layout": layout, "passes": passes})


def _overlap_of(spec: Spec) -> Overlap:
    """What the spec's own graphs do; with `auto`, before it is decided, they overlap nothing."""
    option = spec.passes.overlap_communication
    if option.mode != "on":
        return "off"
    return "on, 2 chunks" if option.chunks == 2 else "on"


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def moe_blocks(program: Program) -> list[int]:
    """Places in the model of the blocks that route, in order."""
    counting = {
        kind
        for kind, unit in program.units.items()
        if any(port.name == "expert_counts" for port in ports(unit.graphs["forward"], "outputs"))
    }
    return [place for place, instance in enumerate(program.instances) if instance.kind in counting]


def gather_weights(engine: Engine) -> dict[str, Tensor]:
    """Every master and every selection bias of the model by name, whole, on rank 0; nothing on the others.

    Parameter by parameter, so that no rank but the first holds more than one whole tensor. Collective.
    """
    from moegraph.runtime.gather import gather_masters

    if engine.mesh.world == 1:
        return engine.state.weights()
    return gather_masters(engine.program, engine.state, engine.mesh)
