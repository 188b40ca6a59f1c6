"""Pipeline parallelism: torch's schedules over stages whose work is given by callbacks.

Contract: torch decides the order of the work and sends the hidden states and their gradients; a `StageWork` does all
computing. Autograd is not used: callbacks run without it, on the thread that called `step`. The order of weight
gradients is that of the micro-batches for every schedule here (tried for 2, 4 and 8 ranks, 2 to 32 micro-batches).

One step of stage s on one rank, for each action of the schedule:
1. F: receive hidden [T, D] from stage s - 1, `forward`, send what it returns. The work keeps the last stage's loss.
2. B: receive the gradient [T, D] from stage s + 1, `backward(split=False)`, send what it returns.
3. I: as B with `split=True`; the weight-gradient work that it returns is kept until
4. W: the kept work runs.

Nothing of a micro-batch is kept here but the kept work between I and W: a received tensor is dropped as soon as the
callback has it. (torch itself may hold what was sent until the step ends.)

Legend: T tokens of a micro-batch on this rank, D model width.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

from moegraph._torch_compat import LeanStage, forget_schedule_step
from moegraph.errors import RunError

# Spec word → class of torch; whether a rank owns several stages; whether they lie in a V (0 1 1 0) or a loop (0 1 0 1).
_SCHEDULES: dict[str, tuple[Callable[..., Any], bool, bool]] = {
    "gpipe": (pipelining.ScheduleGPipe, False, False),
    "1f1b": (pipelining.Schedule1F1B, False, False),
    "interleaved_1f1b": (pipelining.ScheduleInterleaved1F1B, True, False),
    "interleaved_zero_bubble": (pipelining.ScheduleInterleavedZeroBubble, True, False),
    "zbv_zero_bubble": (pipelining.ScheduleZBVZeroBubble, True, True),
    "dual_pipe_v": (pipelining.ScheduleDualPipeV, True, True),
}
_TORCH_LOG = logging.getLogger("torch.distributed.pipelining.schedules")

Deferred = Callable[[], None]


class StageWork(Protocol):
    """What a stage computes. `stage` counts over the whole pipeline, `microbatch` within the step."""

    def forward(self, stage: int, microbatch: int, hidden: Tensor | None) -> Tensor:
        """hidden [T, D] of the previous stage (None for the first) → hidden [T, D], or the last stage's loss, 0-d."""

    def backward(self, stage: int, microbatch: int, grad: Tensor | None, split: bool) -> tuple[Tensor | None, Deferred]:
        """grad [T, D] of the stage's output (None for the last, whose loss has gradient 1) → (gradient [T, D] of its
        input, None for the first; the weight-gradient work left to do).

        With `split` False the weight gradients are computed at once, and the work left does nothing.
        """


class _Stage(LeanStage, pipelining.PipelineStage):
    """A stage of torch's whose forward and backward are the pipeline's callbacks; torch keeps the books."""

    def __init__(self, index: int, pipeline: Pipeline) -> None:
        self.pipeline, self.new_buffer = pipeline, pipeline.empty_hidden  # type: ignore[method-assign]
        self._microbatch, self._split = 0, False
        self._deferred: Deferred = _nothing
        size, dtype = pipeline.hidden
        hidden = torch.empty(size, dtype=dtype, device="meta", requires_grad=True)
        # The first stage's input and the last one's output never travel, but torch wants tensors and a loss of them.
        self.stand_in = torch.zeros(1, device=pipeline.device)
        super().__init__(
            nn.Identity(),
            index,
            pipeline.stages_total,
            pipeline.device,
            input_args=(self.stand_in,) if index == 0 else (hidden,),
            output_args=(self.stand_in,) if index == pipeline.stages_total - 1 else (hidden,),
            group=pipeline.group,
            dw_builder=self._take_deferred,
        )

    def _take_deferred(self) -> Deferred:
        deferred, self._deferred = self._deferred, _nothing
        return deferred

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._microbatch = fwd_chunk_id
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self.release(self.args_recv_info[fwd_chunk_id])
        sends = not self.is_last and self.pipeline.owner(self.stage_index + 1) != self.group_rank
        self.fwd_cache[fwd_chunk_id] = ((output,) if sends else (), [])
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        self._microbatch, self._split = bwd_chunk_id, not full_backward
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        self.release(self.grad_recv_info[bwd_chunk_id])

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Tensor:
        output = self.pipeline.forward(self.stage_index, self._microbatch, None if self.is_first else args[0])
        return self.stand_in if self.is_last else output

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[Tensor | None], None]:
        grad = None if self.is_last else bwd_kwargs["output_grads"][0]
        result, self._deferred = self.pipeline.backward(self.stage_index, self._microbatch, grad, self._split)
        return (result,), None


class Pipeline:
    """This rank's stages of a pipeline, and the schedule that runs them. After a failure no other may use its group."""

    def __init__(
        self,
        *,
        schedule: str,
        stages_total: int,
        my_stages: Sequence[int],
        microbatches: int,
        hidden: tuple[Sequence[int], torch.dtype],
        device: torch.device,
        group: dist.ProcessGroup | None,
        work: StageWork,
    ) -> None:
        """`schedule` is a word of `layout.schedule`, `hidden` ((T, D), dtype) of what travels, `group` the ranks of the
        pipeline (None: the world). Communicates nothing; every rank of the group has to build one.

        Raises ValueError where the schedule does not exist, `my_stages` are not the ones it gives to this rank, or it
        cannot run so few micro-batches.
        """
        if schedule not in _SCHEDULES:
            raise ValueError(f"there is no pipeline schedule {schedule!r}; there are {', '.join(_SCHEDULES)}")
        kind, several, self._v_shaped = _SCHEDULES[schedule]
        self.stages_total, self.hidden, self.device, self.group = stages_total, hidden, device, group
        self._rank, self._ranks, self._work = dist.get_rank(group), dist.get_world_size(group), work
        self._mine = [stage for stage in range(stages_total) if self.owner(stage) == self._rank]
        if sorted(my_stages) != self._mine or (not several and len(self._mine) != 1):
            text = f"{schedule} over {self._ranks} ranks and {stages_total} stages gives rank {self._rank} the stages"
            raise ValueError(f"{text} {self._mine}; it was to own {list(my_stages)}")
        self._stages = [_Stage(stage, self) for stage in self._mine]
        stages = self._stages if several else self._stages[0]
        self._schedule = kind(stages, microbatches, loss_fn=_loss, scale_grads=False)
        stand_ins = torch.zeros(microbatches, device=device)
        self._inputs = (stand_ins,) if self._stages[0].is_first else ()
        self._target = stand_ins if self._stages[-1].is_last else None
        self._failure: BaseException | None = None
        self._round = 0  # steps and evaluations so far; the same on every rank
        self._met = False
        self._left_over: list[object] = []

    def owner(self, stage: int) -> int:
        """The rank, within the group, that owns a stage."""
        turn, place = divmod(stage, self._ranks)
        return self._ranks - 1 - place if self._v_shaped and turn % 2 else place

    def step(self) -> None:
        """One pass of the schedule: all forwards and backwards. Every rank of the group calls it.

        Raises what a callback raised, with a note of the stage and micro-batch, and RuntimeError when a neighbour does
        not answer within the group's timeout. After an error on every rank it may be called again on the CPU; on a GPU
        it raises RunError then, as messages left under way cannot be told from new ones.
        """
        with self._one_round():
            if not self._met:  # NCCL: the first call in a group must be one in which all of its ranks take part
                dist.all_reduce(torch.zeros(1, device=self.device), group=self.group)
                self._met = True
            _TORCH_LOG.addFilter(self._nothing_failed)
            try:
                with torch.enable_grad():  # torch runs no backward where gradients are off
                    self._schedule.step(*self._inputs, target=self._target, return_outputs=False)
            except BaseException as error:
                self._left_over += [error, *forget_schedule_step(self._schedule)]
                for stage in self._stages:
                    stage.forget_step()
                if self._failure is None:
                    raise
            finally:
                _TORCH_LOG.removeFilter(self._nothing_failed)
            if self._failure is not None:
                raise self._failure  # here, so that torch's error is not shown as its context

    def evaluate(self, count: int, forward: Callable[[int, int, Tensor | None], Tensor]) -> list[Tensor]:
        """Forward only, of `count` batches: `forward(stage, batch, hidden)` is as in `StageWork`, without gradients.

        Returns the losses [count] on the rank that owns the last stage and [] on the others. Every rank of the group
        calls it. Raises like `step`.
        """
        losses: list[Tensor] = []
        sends: list[tuple[dist.Work | None, Tensor]] = []
        with self._one_round():
            for batch in range(count):
                earlier, sends = sends, []
                output: Tensor | None = None
                # All ranks go through (batch, stage) in one order, and what a stage waits for comes earlier in it.
                for stage in self._mine:
                    received = output if stage and self.owner(stage - 1) == self._rank else self._receive(stage)
                    with self._callback("evaluation", stage, batch):
                        output = forward(stage, batch, received)
                        if stage < self.stages_total - 1:
                            output = self._checked(output)
                    if stage == self.stages_total - 1:
                        losses.append(output)
                    elif (to := self.owner(stage + 1)) != self._rank:
                        sends.append((dist.isend(output, group=self.group, tag=self._round, group_dst=to), output))
                _wait(earlier)
            _wait(sends)
        return losses

    def forward(self, stage: int, microbatch: int, hidden: Tensor | None) -> Tensor:
        """The work's forward, with its output checked. For the stages."""
        with self._callback("forward", stage, microbatch):
            output = self._work.forward(stage, microbatch, None if hidden is None else hidden.detach())
            return output if stage == self.stages_total - 1 else self._checked(output)

    def backward(self, stage: int, microbatch: int, grad: Tensor | None, split: bool) -> tuple[Tensor | None, Deferred]:
        """The work's backward, with its gradient checked; its deferred work runs as the other callbacks do."""
        with self._callback("backward", stage, microbatch):
            result, deferred = self._work.backward(stage, microbatch, grad, split)
            result = self._checked(result) if stage else None

        def run_deferred() -> None:
            with self._callback("weight gradient", stage, microbatch):
                deferred()

        return result, run_deferred if split else _nothing

    def empty_hidden(self) -> Tensor:
        """Room [T, D] for a hidden state or its gradient."""
        return torch.empty(tuple(self.hidden[0]), dtype=self.hidden[1], device=self.device)

    def _checked(self, tensor: Tensor | None) -> Tensor:
        """What travels: contiguous [T, D] in the pipeline's dtype."""
        size, dtype = tuple(self.hidden[0]), self.hidden[1]
        assert tensor is not None, "a stage returned None for a tensor that travels"
        found = tuple(tensor.shape), tensor.dtype
        assert found == (size, dtype), f"a stage returned {found}, not {(size, dtype)}"
        return tensor.detach().contiguous()

    def _receive(self, stage: int) -> Tensor | None:
        """The input of a stage, for the batch whose turn it is; None for the first stage."""
        if stage == 0:
            return None
        hidden = self.empty_hidden()
        dist.recv(hidden, group=self.group, tag=self._round, group_src=self.owner(stage - 1))
        return hidden

    @contextmanager
    def _one_round(self) -> Iterator[None]:
        """A step or an evaluation runs within. What one that fails leaves under way is kept until another succeeds:
        neighbours may not have received it yet, and gloo stalls where either end of a message is gone."""
        if self._left_over and self.device.type != "cpu":
            raise RunError("a step of the pipeline failed on this GPU, so no other can follow; start the run again")
        self._failure = None
        self._round += 1
        for stage in self._stages:
            stage.round = self._round
        try:
            yield
        except BaseException as error:
            self._left_over.append(error)
            raise
        self._left_over.clear()

    @contextmanager
    def _callback(self, what: str, stage: int, microbatch: int) -> Iterator[None]:
        """A callback runs within: without autograd; its error is kept, which torch would wrap in one of its own."""
        try:
            with torch.no_grad():
                yield
        except BaseException as error:
            error.add_note(f"in the {what} of pipeline stage {stage}, micro-batch {microbatch}")
            self._failure = error
            raise

    def _nothing_failed(self, record: logging.LogRecord) -> bool:
        """Filters torch's log: where a callback failed, the whole schedule in print is no help."""
        return self._failure is None


def _loss(output: Tensor, target: Tensor) -> Tensor:
    """torch runs backwards only where there is a loss; the true one is the work's."""
    return output.sum()


def _nothing() -> None:
    pass


def _wait(sends: Iterable[tuple[dist.Work | None, Tensor]]) -> None:
    for work, _ in sends:
        if work is not None:
            work.wait()
