"""AdamW on master weights (arXiv 1711.05101).

Contract: the masters, in float32 (float64 when the model computes in float64), are the one authority; weights in the
compute dtype are copies written from them. With gradient g, step count t, learning rate r and weight decay d of the
parameter:

    m ← β1 m + (1 - β1) g        v ← β2 v + (1 - β2) g²
    w ← w - r d w - r · (m / (1 - β1ᵗ)) / (sqrt(v / (1 - β2ᵗ)) + eps)

An expert that no token visited is no exception: its gradient is zero, so its moments decay, its weights move by what
is left of them, and weight decay applies. The result is the same however experts are spread over ranks.

Masters and both moments lie in flat buffers. Every element's arithmetic is its own, so a step is bitwise repeatable.
With `moments: bf16` the moments are widened for the arithmetic of a step and rounded to nearest when they are kept. On
CUDA moegraph's kernel does a step in one pass over memory (`moegraph.kernels.adamw`), elsewhere torch's fused AdamW.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

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
        self._counts = torch.zeros(len(shapes), dtype=torch.float32, device=first.device)

    @torch.no_grad()
    def step(self, gradients: Mapping[str, Tensor], lr: float) -> None:
        """One step with the gradient of each trained parameter, already scaled and clipped, at learning rate `lr`."""
        self.begin_step()
        self.update(self.masters, gradients, lr)

    def begin_step(self) -> None:
        """Counts one step; `update` then does it, some parameters at a time."""
        self.steps += 1

    @torch.no_grad()
    def update(
        self,
        names: Iterable[str],
        gradients: Mapping[str, Tensor],
        lr: float,
        factor: float = 1.0,
        copies: Mapping[str, Tensor] | None = None,
    ) -> None:
        """The step that was begun, for these parameters: with their gradients times `factor`, at learning rate `lr`;
        their new masters are also written, rounded, into `copies`."""
        copies = copies or {}
        by_values: dict[GroupValues, list[str]] = {}
        for name in names:
            by_values.setdefault(self.groups[name], []).append(name)
        on_gpu = self.masters.flat.device.type == "cuda" and self.masters.flat.dtype == torch.float32
        for values, members in by_values.items():
            if on_gpu:
                self._with_kernel(values, members, gradients, lr, factor, copies)
            else:
                self._with_torch(values, members, gradients, lr, factor)
                self.write_compute_copies({name: copies[name] for name in members if name in copies})

    def _with_kernel(
        self,
        values: GroupValues,
        names: Sequence[str],
        gradients: Mapping[str, Tensor],
        lr: float,
        factor: float,
        copies: Mapping[str, Tensor],
    ) -> None:
        from moegraph.kernels.adamw import adamw as one_pass

        for name in names:
            one_pass(
                self.masters[name],
                gradients[name],
                self.exp_avg[name],
                self.exp_avg_sq[name],
                copies.get(name),
                factor=factor,
                lr=lr * values.lr_scale,
                beta1=self.options.betas[0],
                beta2=self.options.betas[1],
                eps=self.options.eps,
                weight_decay=values.weight_decay,
                step=self.steps,
            )

    def _with_torch(
        self, values: GroupValues, names: Sequence[str], gradients: Mapping[str, Tensor], lr: float, factor: float
    ) -> None:
        wide = self.masters.flat.dtype
        narrow = self.exp_avg.flat.dtype != wide
        # Narrow moments are widened parameter by parameter, so that no more than one is there twice.
        for members in [[name] for name in names] if narrow else [list(names)]:
            exp_avg = [self.exp_avg[name].to(wide) for name in members]
            exp_avg_sq = [self.exp_avg_sq[name].to(wide) for name in members]
            grads = [gradients[name].to(wide) for name in members]
            self._counts.fill_(self.steps - 1)  # adamw counts each of them up
            adamw(
                [self.masters[name] for name in members],
                grads if factor == 1.0 else [grad * factor for grad in grads],
                exp_avg,
                exp_avg_sq,
                [],
                list(self._counts[: len(members)].unbind()),
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
                self.exp_avg[members[0]].copy_(exp_avg[0])
                self.exp_avg_sq[members[0]].copy_(exp_avg_sq[0])

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
