"""Everything of a model that training changes: masters and their copies, moments, selection biases.

Contract: `commit` is the only place where any of it changes. The masters (float32, or float64 when the model computes
in float64) are the one authority; what the graphs read is the master itself where the dtypes agree, else a copy that is
rounded from it after each step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moegraph.graph.program import Program
from moegraph.runtime.gradient_norm import clip_factor
from moegraph.runtime.gradients import GradientBuffers
from moegraph.runtime.initialise import initial_values
from moegraph.runtime.optimizer import AdamW
from moegraph.runtime.router_metrics import updated_bias
from moegraph.specs.schema import Spec


def master_dtype(spec: Spec) -> torch.dtype:
    """The dtype of masters, moments and gradients."""
    return torch.float64 if spec.precision.compute == "fp64" else torch.float32


class ModelState:
    """The state of a run at its start. `values` maps every name of the model to the tensor its graphs read."""

    def __init__(self, spec: Spec, program: Program, device: torch.device) -> None:
        self.spec = spec
        start = initial_values(program.parameters.values(), spec.train.seed, master_dtype(spec))
        start = {name: value.to(device) for name, value in start.items()}
        self.optimizer = AdamW(program.parameters, start, spec.train.optimizer)
        self.values: dict[str, Tensor] = {}
        self._copies: dict[str, Tensor] = {}
        self._biases: list[str] = []  # in the order of the layers
        masters = self.optimizer.masters
        for name, parameter in program.parameters.items():
            if parameter.trained and parameter.dtype == masters.flat.dtype:
                self.values[name] = masters[name]
                continue
            self.values[name] = start[name].to(parameter.dtype, copy=True)
            if parameter.trained:
                self._copies[name] = self.values[name]
            elif parameter.role == "select_bias":
                self._biases.append(name)

    @torch.no_grad()
    def commit(self, gradients: GradientBuffers, norm: float, lr: float, expert_counts: Tensor | None) -> None:
        """One step: clips the gradients, which have this finite norm, and moves parameters, moments and biases.

        expert_counts [MoE layers, E]: the choices that fell on each expert in the whole step, over unmasked tokens.
        """
        factor = clip_factor(norm, self.spec.train.clip_norm)
        if factor != 1.0:
            gradients.flat.mul_(factor)
        self.optimizer.step(gradients, lr)
        self.optimizer.write_compute_copies(self._copies)
        if self._biases:
            assert self.spec.model.moe is not None
            assert expert_counts is not None
            rate = self.spec.model.moe.router.bias_update_rate
            for name, counts in zip(self._biases, expert_counts, strict=True):
                self.values[name].copy_(updated_bias(self.values[name], counts, rate))

    def weights(self) -> dict[str, Tensor]:
        """What a trained model is: every master and every selection bias by name."""
        return {**self.optimizer.masters, **{name: self.values[name] for name in self._biases}}
