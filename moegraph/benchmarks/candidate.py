"""One block that has been set up, moegraph's or a peer's, and what is asked of both alike."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moegraph.benchmarks.blocks import Block, Routed
from moegraph.benchmarks.inputs import Inputs
from moegraph.benchmarks.reference import Result
from moegraph.benchmarks.shapes import Shape
from moegraph.benchmarks.timing import Job


class Candidate:
    """Sets `block` up for a shape and weights w_up [E, 2F, D], w_down [E, D, F]; a peer gets them without gradients."""

    def __init__(self, block: Any, shape: Shape, w_up: Tensor, w_down: Tensor) -> None:
        own = isinstance(block, Block)
        block.setup(shape.cfg, *((w_up, w_down) if own else (w_up.detach(), w_down.detach())))
        self.block = block
        self.is_block = not hasattr(block, "time_fwd")
        self.has_backward = bool(getattr(block, "has_bwd", True))

    def outputs(self, inputs: Inputs) -> tuple[Tensor, ...]:
        """The output [T, D], and where the block has its own router the loss."""
        out = self.block.fwd(inputs.x, inputs.logits)
        return out if isinstance(out, tuple) else (out,)

    def gradients(self, inputs: Inputs, outputs: tuple[Tensor, ...]) -> list[Tensor]:
        """Gradients of x, of the logits unless the block makes its own, and of the block's parameters."""
        logits = [] if isinstance(self.block, Routed) else [inputs.logits]
        leaves = [inputs.x, *logits, *self.block.params]
        starts = [inputs.grad, *[None for _ in outputs[1:]]]
        return list(torch.autograd.grad(outputs, leaves, starts))

    def run(self, inputs: Inputs) -> Result:
        """Forward and backward once, gradients in the layout of the weights given."""
        outputs = self.outputs(inputs)
        if not self.has_backward:
            return Result(outputs[0].detach())
        dx, *rest = self.gradients(inputs, outputs)
        if isinstance(self.block, Routed):
            return Result(outputs[0].detach(), dx, rest[2], rest[0], rest[1])
        weights = tuple(self.block.canon(rest[1:]))
        if len(weights) != 2:
            raise ValueError(f"canon gave {len(weights)} gradients, and 2 are needed: of w_up and of w_down")
        return Result(outputs[0].detach(), dx, rest[0], *weights)

    def router(self, inputs: Inputs) -> tuple[Tensor, Tensor] | None:
        """Weight [E, D] and logits [T, E] of the block's own router, if it has one."""
        return self.block.router(inputs.x) if isinstance(self.block, Routed) else None

    def jobs(self, inputs: list[Inputs], backward: bool) -> dict[str, Job]:
        """`forward` and, if wanted and there is one, `forward_backward`, over the input sets in rotation.

        Forward keeps what backward needs.
        """

        def forward(count: int) -> None:
            self.outputs(inputs[count % len(inputs)])

        def forward_backward(count: int) -> None:
            each = inputs[count % len(inputs)]
            self.gradients(each, self.outputs(each))

        found: dict[str, Job] = {"forward": forward if self.is_block else self.block.time_fwd}
        if backward and self.has_backward:
            found["forward_backward"] = forward_backward if self.is_block else self.block.time_fb
        return found
