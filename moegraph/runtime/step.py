"""One training step: compute, agree, commit.

Compute reads parameters and the batch and writes only gradient buffers and this step's counters. Agree reads loss and
norm on the host, once. Commit alone changes parameters, moments and selection biases.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moegraph.data.loader import StepBatch
from moegraph.errors import UsageError
from moegraph.graph.program import Program, ports
from moegraph.runtime.executor import Activations, Executor
from moegraph.runtime.gradients import GradientBuffers
from moegraph.specs.schema import Spec
from moegraph.step.auxiliary import OUTPUTS, AuxiliaryRule


@dataclass
class Computed:
    """What the compute phase of a step found, still on the device.

    `loss` is the mean cross entropy of the step's valid targets; `balance` and `z` are what the auxiliary losses add
    to it, coefficients included. `expert_counts` [layers, E], `probability_sum` [layers, E] and `router_entropy`
    [layers] are sums over micro-batches (the entropy: mean over tokens), over the MoE layers in order.
    """

    loss: Tensor
    balance: Tensor
    z: Tensor
    expert_counts: Tensor | None
    probability_sum: Tensor | None
    router_entropy: Tensor | None
    tokens: int  # unmasked tokens of the step


class StepComputer:
    """Runs the micro-batches of a step in the order the layout's schedule names, for one stage.

    `gpipe` runs all forwards before the first backward; every other schedule of one stage is forward, backward,
    forward, backward …
    """

    def __init__(self, spec: Spec, executor: Executor, gradients: GradientBuffers, device: torch.device) -> None:
        self.spec, self.executor, self.gradients, self.device = spec, executor, gradients, device
        self.rule = AuxiliaryRule.from_spec(spec)
        _check_auxiliary(executor.program, OUTPUTS if self.rule is not None else ())
        self.all_forwards_first = spec.layout.schedule == "gpipe" or (
            self.rule is not None and self.rule.needs_all_forwards
        )

    def compute(self, batch: StepBatch) -> Computed:
        """Gradients of the step's loss into the gradient buffers, and what the step reports."""
        count = self.spec.layout.microbatches
        total_tokens = int((batch.document_ids >= 0).sum())
        micro_batches = [batch.microbatch(index=i, count=count) for i in range(count)]
        self.gradients.begin()
        parts = _Parts(self.device)
        if self.all_forwards_first:
            running = [self._forward(micro_batch, batch.valid_targets) for micro_batch in micro_batches]
            tangents = self._tangents(running, total_tokens, parts)
            for activations, tangent in zip(running, tangents, strict=True):
                parts.collect(activations)
                self.executor.backward(activations, tangent, self.gradients)
        else:
            for micro_batch in micro_batches:
                activations = self._forward(micro_batch, batch.valid_targets)
                (tangent,) = self._tangents([activations], total_tokens, parts)
                parts.collect(activations)
                self.executor.backward(activations, tangent, self.gradients)
        self.gradients.finish()
        return parts.finish(total_tokens)

    def _forward(self, micro_batch: Mapping[str, Tensor], valid_targets: int) -> Activations:
        activations = self.executor.forward(self.place(micro_batch, valid_targets))
        activations.unmasked_tokens = int((micro_batch["document_ids"] >= 0).sum())
        return activations

    def place(self, micro_batch: Mapping[str, Tensor], valid_targets: int) -> dict[str, Tensor]:
        """A micro-batch on the device, tokens and labels flattened to [T], with `inverse_targets` 0-d."""
        placed = {
            "tokens": micro_batch["tokens"].reshape(-1),
            "labels": micro_batch["labels"].reshape(-1),
            "positions": micro_batch["positions"],
            "document_ids": micro_batch["document_ids"],
        }
        dtype = self.gradients.flat.dtype
        placed["inverse_targets"] = torch.tensor(1.0 / max(valid_targets, 1), dtype=dtype)
        return {name: value.to(self.device, non_blocking=True) for name, value in placed.items()}

    def _tangents(
        self, running: Sequence[Activations], total_tokens: int, parts: _Parts
    ) -> list[dict[tuple[int, str], Tensor]]:
        """Tangents of every auxiliary output of these micro-batches; their losses are added to `parts`."""
        tangents: list[dict[tuple[int, str], Tensor]] = [{} for _ in running]
        if self.rule is None:
            return tangents
        for activations, found in zip(running, tangents, strict=True):
            share = activations.unmasked_tokens / max(total_tokens, 1)
            for name in ("balance", "z"):
                for index, value in activations.auxiliary(name):
                    factor = self.rule.scalar_factor(name, share)
                    found[index, name] = torch.full((), factor, dtype=value.dtype, device=self.device)
                    parts.add(name, value * factor)
        if self.rule.uses_sums:
            groups = [list(range(len(running)))] if self.rule.needs_all_forwards else [[i] for i in range(len(running))]
            for group in groups:
                self._tangents_of_sums([running[i] for i in group], [tangents[i] for i in group], total_tokens, parts)
        return tangents

    def _tangents_of_sums(
        self,
        running: Sequence[Activations],
        tangents: Sequence[dict[tuple[int, str], Tensor]],
        total_tokens: int,
        parts: _Parts,
    ) -> None:
        """The balance loss of micro-batches taken together, from counts and probability sums of each layer."""
        assert self.rule is not None
        name = "probability_sum"
        indices = [index for index, _ in running[0].auxiliary(name)]
        sums = [torch.stack(list(values)).sum(0) for values in zip(*(a.metrics(name) for a in running), strict=True)]
        per_layer = zip(*(a.metrics("expert_counts") for a in running), strict=True)
        counts = [torch.stack(list(values)).sum(0) for values in per_layer]
        tokens = sum(activations.unmasked_tokens for activations in running)
        loss, vectors = self.rule.from_sums(counts, sums, tokens, tokens / max(total_tokens, 1))
        parts.add("balance", loss)
        for found in tangents:
            found.update({(index, name): vector for index, vector in zip(indices, vectors, strict=True)})


def _check_auxiliary(program: Program, known: Sequence[str]) -> None:
    """Raises `UsageError` for an auxiliary loss that a pass added and that nothing gives a coefficient."""
    for kind, unit in program.units.items():
        for port in ports(unit.graphs["forward"], "outputs"):
            if port.role == "auxiliary" and port.name not in known:
                raise UsageError(
                    f"{kind} returns the auxiliary loss {port.name!r}, which has no coefficient in the spec: add it to "
                    "the block's hidden output or loss, or make it a metric"
                )


class _Parts:
    """Sums over micro-batches of what a step reports."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.loss: Tensor | None = None
        self.auxiliary: dict[str, Tensor] = {}
        self.metrics: dict[str, Tensor] = {}

    def add(self, name: str, value: Tensor) -> None:
        self.auxiliary[name] = self.auxiliary[name] + value if name in self.auxiliary else value

    def collect(self, activations: Activations) -> None:
        self.loss = activations.loss if self.loss is None else self.loss + activations.loss
        for name in ("expert_counts", "probability_sum", "router_entropy"):
            values = activations.metrics(name)
            if values:
                # The entropy is a mean over a micro-batch's tokens: weighed by them, the sum becomes the step's mean.
                stacked = torch.stack(values) * (activations.unmasked_tokens if name == "router_entropy" else 1)
                self.metrics[name] = self.metrics[name] + stacked if name in self.metrics else stacked

    def finish(self, tokens: int) -> Computed:
        assert self.loss is not None
        zero = torch.zeros_like(self.loss)
        entropy = self.metrics.get("router_entropy")
        return Computed(
            loss=self.loss,
            balance=self.auxiliary.get("balance", zero),
            z=self.auxiliary.get("z", zero),
            expert_counts=self.metrics.get("expert_counts"),
            probability_sum=self.metrics.get("probability_sum"),
            router_entropy=None if entropy is None else entropy / max(tokens, 1),
            tokens=tokens,
        )
