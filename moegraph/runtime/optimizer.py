"""AdamW on master weights (arXiv 1711.05101).

Contract: the masters, in float32 (float64 when the model computes in float64), are the one authority; weights in the
compute dtype are copies written from them. With gradient g, step count t, learning rate r and weight decay d of the
parameter:

    m ← β1 m + (1 - β1) g        v ← β2 v + (1 - β2) g²
    w ← w - r d w - r · (m / (1 - β1ᵗ)) / (sqrt(v / (1 - β2ᵗ)) + eps)

An expert that no token visited is no exception: its gradient is zero, so its moments decay, its weights move by what
is left of them, and weight decay applies. The result is the same however experts are spread over ranks.

Masters and both moments lie in flat buffers. Every element's arithmetic is its own, so a step is bitwise repeatable.
With `moments: bf16` the moments are widened for the arithmetic of a step and rounded to nearest when they are kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from moegraph.errors import RunError
from moegraph.graph.program import Parameter
from moegraph.runtime.flat import FlatTensors
from moegraph.runtime.parameter_groups import GroupValues, parameter_groups
from moegraph.specs.schema import AdamW as AdamWOptions

_STEP = "step"


class AdamW:
    """The optimizer of one process.

    parameters: the model's; only trained ones take part. masters: the starting value of each that this process keeps,
    float32 or float64, on the device where the optimizer is to work; they are copied. A master may be a piece of its
    parameter, flattened: every element's arithmetic is its own. options: `train.optimizer` of the spec.
    Raises `SpecError` if a group rule matches nothing.

    `masters[name]` are the master weights, `groups[name]` the values a parameter trains with, `steps` the number of
    steps taken.
    """

    def __init__(
        self, parameters: Mapping[str, Parameter], masters: Mapping[str, Tensor], options: AdamWOptions
    ) -> None:
        self.options = options
        groups = parameter_groups(parameters, options.groups, options.weight_decay)
        self.groups = {name: values for name, values in groups.items() if name in masters}
        first = next(iter(masters.values()), torch.empty(0))  # a small shard may hold nothing
        shapes = {name: masters[name].shape for name in self.groups}
        self.masters = FlatTensors(shapes, first.dtype, first.device)
        kept = torch.bfloat16 if options.moments == "bf16" else first.dtype
        self.exp_avg = FlatTensors(shapes, kept, first.device)
        self.exp_avg_sq = FlatTensors(shapes, kept, first.device)
        for name, master in self.masters.items():
            if masters[name].dtype != master.dtype or masters[name].numel() > math.prod(parameters[name].shape):
                raise ValueError(f"master of {name}: {masters[name].dtype} {tuple(masters[name].shape)} does not fit")
            master.copy_(masters[name])
        self.steps = 0
        self._names: dict[GroupValues, list[str]] = {}
        for name, values in self.groups.items():
            self._names.setdefault(values, []).append(name)
        self._counts = torch.zeros(len(shapes), dtype=torch.float32, device=first.device)

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor], lr: float) -> None:
        """One step with the gradient of each trained parameter, already scaled and clipped, at learning rate `lr`."""
        narrow = self.exp_avg.flat.dtype != self.masters.flat.dtype
        # Narrow moments are widened parameter by parameter, so that no more than one is there twice.
        parts = [(v, [n]) for v, names in self._names.items() for n in names] if narrow else self._names.items()
        for values, names in parts:
            moments = [[t[name].to(self.masters.flat.dtype) for name in names] for t in (self.exp_avg, self.exp_avg_sq)]
            self._counts.fill_(self.steps)  # adamw counts each of them up
            grads = [gradients[name].to(self.masters.flat.dtype) for name in names]
            adamw(
                [self.masters[name] for name in names],
                grads,
                *moments,
                [],
                list(self._counts[: len(names)].unbind()),
                fused=True,
                amsgrad=False,
                beta1=self.options.betas[0],
                beta2=self.options.betas[1],
                lr=lr * values.lr_scale,
                weight_decay=values.weight_decay,
                eps=self.options.eps,
                maximize=False,
            )
            if narrow:
                self.exp_avg[names[0]].copy_(moments[0][0])
                self.exp_avg_sq[names[0]].copy_(moments[1][0])
        self.steps += 1

    @torch.no_grad()
    def write_compute_copies(self, copies: Mapping[str, Tensor]) -> None:
        """Writes the master of each parameter in `copies` into its copy, rounded to the copy's dtype."""
        for name, copy in copies.items():
            copy.copy_(self.masters[name])

    def state_dict(self) -> dict[str, Tensor]:
        """Everything a step depends on, as named tensors: `master.NAME`, `exp_avg.NAME`, `exp_avg_sq.NAME` (views, not
        copies) and `step` (0-d int64)."""
        state = {f"{kind}.{name}": value for kind, tensors in self._state().items() for name, value in tensors.items()}
        return {**state, _STEP: torch.tensor(self.steps, dtype=torch.int64)}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes over a state dict. Raises `RunError`, and changes nothing, if its names, shapes or dtypes differ."""
        own = self.state_dict()
        _refuse("lacks", own.keys() - state.keys())
        _refuse("has, unknown here,", state.keys() - own.keys())
        for name, value in own.items():
            if state[name].shape != value.shape or state[name].dtype != value.dtype:
                raise RunError(
                    f"optimizer state: {name} is {state[name].dtype} {tuple(state[name].shape)}, this run needs "
                    f"{value.dtype} {tuple(value.shape)}; resume with the spec that wrote it"
                )
        for name, value in own.items():
            value.copy_(state[name])
        self.steps = int(state[_STEP])

    def _state(self) -> dict[str, FlatTensors]:
        return {"master": self.masters, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}


def _refuse(how: str, names: set[str]) -> None:
    if names:
        shown = ", ".join(sorted(names)[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        raise RunError(f"optimizer state {how} {shown}; resume with the spec that wrote it")
