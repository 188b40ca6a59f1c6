"""The compute phase of a training step on one rank.

Compute reads parameters and the batch and writes only gradient buffers and this step's numbers. What follows, agreeing
with the other ranks and committing, is in `agree` and `model_state`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from moegraph.data.loader import StepBatch
from moegraph.errors import UsageError
from moegraph.graph.program import Program, ports
from moegraph.runtime.computed import Computed, Parts
from moegraph.runtime.executor import Activations, Executor
from moegraph.runtime.gradients import GradientBuffers
from moegraph.runtime.mesh import SINGLE, Mesh
from moegraph.specs.schema import Spec
from moegraph.step.auxiliary import OUTPUTS, AuxiliaryRule

if TYPE_CHECKING:
    from moegraph.runtime.pipeline import Pipeline


class StepComputer:
    """Runs the micro-batches of a step in the order the layout's schedule names.

    With one stage, `gpipe` runs all forwards before the first backward, and every other schedule is forward, backward,
    forward, backward …; with several, `pipeline` runs the schedule.
    """

    def __init__(
        self,
        spec: Spec,
        executor: Executor,
        gradients: GradientBuffers,
        device: torch.device,
        mesh: Mesh = SINGLE,
    ) -> None:
        self.spec, self.executor, self.gradients, self.device, self.mesh = spec, executor, gradients, device, mesh
        self.rule = AuxiliaryRule.from_spec(spec)
        _check_auxiliary(executor.program, OUTPUTS if self.rule is not None else ())
        self.all_forwards_first = spec.layout.schedule == "gpipe" or (
            self.rule is not None and self.rule.needs_all_forwards
        )
        self._expected = self._gradients_to_expect()
        self._running: _Running | None = None
        self._pipeline: Pipeline | None = None

    def compute(self, batch: StepBatch) -> Computed:
        """Gradients of the step's loss into the gradient buffers, reduced over replicas, and what this rank reports."""
        running = self._running = _Running(self, batch)
        self.gradients.begin(self._expected)
        if self.mesh.pp > 1:
            self._run_pipeline()
        else:
            running.run_one_stage(self.all_forwards_first)
        self.gradients.finish()
        self._running = None
        return running.parts.finish(running.total_tokens)

    def evaluate(
        self, batches: Sequence[StepBatch | None], targets: int, like: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """(this rank's part of the mean cross entropy over `targets` valid targets, rows that found no place), each
        0-d, over its batches. None stands for a batch of padding only, of the shapes in `like`: where tokens travel,
        every rank has to take part as often as the others."""
        placed = [self.place(_padding(like) if batch is None else batch.microbatch(), targets) for batch in batches]
        overflow: list[Tensor] = []
        if self.mesh.pp > 1:
            found = self._the_pipeline().evaluate(
                len(placed), lambda stage, i, hidden: self.executor.evaluate(placed[i], hidden, stage, overflow)
            )
        else:
            found = [self.executor.evaluate(each, overflow=overflow) for each in placed]
        zero = torch.zeros((), dtype=torch.float64, device=self.device)
        loss = torch.stack([each.double() for each in found]).sum() if found else zero
        return loss, torch.stack(overflow).sum().double() if overflow else zero

    def place(self, micro_batch: Mapping[str, Tensor], valid_targets: int) -> dict[str, Tensor]:
        """A micro-batch on the device, tokens and labels flattened to [T], with `inverse_targets` 0-d."""
        placed = {
            "tokens": micro_batch["tokens"].reshape(-1),
            "labels": micro_batch["labels"].reshape(-1),
            "positions": micro_batch["positions"],
            "document_ids": micro_batch["document_ids"],
        }
        placed["inverse_targets"] = torch.tensor(1.0 / max(valid_targets, 1), dtype=self.gradients.dtype)
        return {name: value.to(self.device, non_blocking=True) for name, value in placed.items()}

    def _run_pipeline(self) -> None:
        self._the_pipeline().step()

    def _the_pipeline(self) -> Pipeline:
        if self._pipeline is None:
            from moegraph.runtime.pipeline import Pipeline  # torch's schedules take more than a second to import

            spec = self.spec
            tokens = spec.sequences_per_microbatch * spec.data.seq_len
            self._pipeline = Pipeline(
                schedule=spec.layout.schedule,
                stages_total=1 + max(instance.stage for instance in self.executor.program.instances),
                my_stages=tuple(self.executor.stages),
                microbatches=spec.layout.microbatches,
                hidden=((tokens, spec.model.d_model), _hidden_dtype(self.executor.program)),
                device=self.device,
                group=self.mesh.groups.get("pp"),
                work=_Work(self),
            )
        return self._pipeline

    @property
    def running(self) -> _Running:
        """The step that is being computed."""
        assert self._running is not None
        return self._running

    def _gradients_to_expect(self) -> dict[str, int]:
        """How many gradients each parameter gets in a step on this rank."""
        found: dict[str, int] = {}
        for blocks in self.executor.stages.values():
            for _, instance in blocks:
                for port in self.executor.graphs[instance.kind]["backward"].outputs:
                    if port.role in ("grad", "added"):
                        name = instance.parameters[port.name]
                        found[name] = found.get(name, 0) + self.spec.layout.microbatches
        return found


class _Work:
    """What the pipeline calls for each stage and micro-batch."""

    def __init__(self, computer: StepComputer) -> None:
        self._computer = computer

    def forward(self, stage: int, microbatch: int, hidden: Tensor | None) -> Tensor:
        return self._computer.running.forward(stage, microbatch, hidden)

    def backward(
        self, stage: int, microbatch: int, grad: Tensor | None, split: bool
    ) -> tuple[Tensor | None, Callable[[], None]]:
        return self._computer.running.backward(stage, microbatch, grad, split)


class _Running:
    """One step being computed: its micro-batches, what each stage keeps of them, and their tangents."""

    def __init__(self, computer: StepComputer, batch: StepBatch) -> None:
        self.computer, self.spec = computer, computer.spec
        self.valid_targets = batch.valid_targets
        self.total_tokens = int((batch.document_ids >= 0).sum())
        count, mesh = self.spec.layout.microbatches, computer.mesh
        self.micro_batches = [batch.microbatch(mesh.dp_rank, mesh.dp, index=i, count=count) for i in range(count)]
        self._placed: dict[int, dict[str, Tensor]] = {}
        self._kept: dict[tuple[int, int], Activations] = {}
        self._known_tangents: dict[tuple[int, int], dict[tuple[int, str], Tensor]] = {}
        self.parts = Parts(computer.device)

    def run_one_stage(self, all_forwards_first: bool) -> None:
        """Every micro-batch through the whole model."""
        every = range(len(self.micro_batches))
        if all_forwards_first:
            for i in every:
                self.forward(0, i, None)
            for i in every:
                self.backward(0, i, None, split=False)
        else:
            for i in every:
                self.forward(0, i, None)
                self.backward(0, i, None, split=False)

    def forward(self, stage: int, index: int, hidden: Tensor | None) -> Tensor:
        """The hidden output of a stage, or the loss of the last one."""
        if index not in self._placed:
            self._placed[index] = self.computer.place(self.micro_batches[index], self.valid_targets)
        arguments = () if hidden is None and stage == 0 else (hidden, stage)
        activations = self.computer.executor.forward(self._placed[index], *arguments)
        activations.unmasked_tokens = int((self.micro_batches[index]["document_ids"] >= 0).sum())
        self._kept[stage, index] = activations
        return activations.hidden if activations.hidden is not None else activations.loss

    def backward(
        self, stage: int, index: int, grad: Tensor | None, split: bool
    ) -> tuple[Tensor | None, Callable[[], None]]:
        """The gradient of a stage's hidden input, and what is left to do for its weights."""
        tangents = self._tangents(stage, index)
        activations = self._kept.pop((stage, index))
        self.parts.collect(activations)
        later: list[Callable[[], None]] | None = [] if split else None
        computer = self.computer
        found = computer.executor.backward(activations, tangents, computer.gradients, grad, later)

        def weights() -> None:
            for each in later or ():
                each()
            if later:
                later.clear()

        return found, weights

    def _tangents(self, stage: int, index: int) -> dict[tuple[int, str], Tensor]:
        """Tangents of every auxiliary output of a micro-batch in a stage; their losses are added to `parts`."""
        rule = self.computer.rule
        if rule is None:
            return {}
        if (stage, index) not in self._known_tangents:
            together = range(len(self.micro_batches)) if rule.needs_all_forwards else (index,)
            members = [self._kept[stage, i] for i in together]
            tangents = [self._of_scalars(rule, each) for each in members]
            if rule.uses_sums:
                self._of_sums(rule, members, tangents)
            self._known_tangents.update({(stage, i): found for i, found in zip(together, tangents, strict=True)})
        return self._known_tangents.pop((stage, index))

    def _of_scalars(self, rule: AuxiliaryRule, activations: Activations) -> dict[tuple[int, str], Tensor]:
        share = activations.unmasked_tokens / max(self.total_tokens, 1)
        found: dict[tuple[int, str], Tensor] = {}
        for name in ("balance", "z"):
            for place, value in activations.auxiliary(name):
                factor = rule.scalar_factor(name, share)
                found[place, name] = torch.full((), factor, dtype=value.dtype, device=self.computer.device)
                self.parts.add(name, value * factor)
        return found

    def _of_sums(
        self, rule: AuxiliaryRule, members: Sequence[Activations], tangents: Sequence[dict[tuple[int, str], Tensor]]
    ) -> None:
        """The balance loss of micro-batches taken together, from counts and probability sums of each layer. Over the
        global batch, the counts are those of all ranks."""
        name = "probability_sum"
        places = [place for place, _ in members[0].auxiliary(name)]
        if not places:
            return
        sums = [torch.stack([v for _, v in vs]).sum(0) for vs in zip(*(a.metrics(name) for a in members), strict=True)]
        per_layer = zip(*(a.metrics("expert_counts") for a in members), strict=True)
        counts = torch.stack([torch.stack([v for _, v in values]).sum(0) for values in per_layer])
        tokens = sum(activations.unmasked_tokens for activations in members)
        group = self.computer.mesh.groups.get("dp")
        if rule.needs_all_forwards:
            tokens = self.total_tokens
            if group is not None:
                dist.all_reduce(counts, group=group)
        loss, vectors = rule.from_sums(list(counts), sums, tokens, tokens / max(self.total_tokens, 1))
        self.parts.add("balance", loss)
        for found in tangents:
            found.update({(place, name): vector for place, vector in zip(places, vectors, strict=True)})


def _padding(like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A micro-batch without a target, of the shapes of another."""
    empty = {name: torch.zeros_like(value) for name, value in like.items()}
    empty["labels"] = torch.full_like(like["labels"], -100)
    empty["document_ids"] = torch.full_like(like["document_ids"], -1)
    return empty


def _check_auxiliary(program: Program, known: Sequence[str]) -> None:
    """Raises `UsageError` for an auxiliary loss that a pass added and that nothing gives a coefficient."""
    for kind, unit in program.units.items():
        for port in ports(unit.graphs["forward"], "outputs"):
            if port.role == "auxiliary" and port.name not in known:
                raise UsageError(
                    f"{kind} returns the auxiliary loss {port.name!r}, which has no coefficient in the spec: add it to "
                    "the block's hidden output or loss, or make it a metric"
                )


def _hidden_dtype(program: Program) -> torch.dtype:
    node = next(iter(program.units["embedding"].graphs["forward"].graph.find_nodes(op="output")))
    dtype: torch.dtype = node.meta["val"][0].dtype
    return dtype
