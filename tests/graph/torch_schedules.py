"""What torch's own pipeline schedules do, found out without a process group."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch.distributed.pipelining.schedules import get_schedule_class

NAMES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved_1f1b": "Interleaved1F1B",
    "interleaved_zero_bubble": "InterleavedZeroBubble",
    "zbv_zero_bubble": "ZBVZeroBubble",
    "dual_pipe_v": "DualPipeV",
}


def schedule_of_several_stages(name: str, pp: int, microbatches: int) -> Any:
    """One of the schedules with two stages per rank, as rank 0 would make it."""
    stages: Any = [
        SimpleNamespace(stage_index=i, num_stages=2 * pp, group_size=pp, group_rank=0, submod=None) for i in range(2)
    ]
    return get_schedule_class(NAMES[name])(stages, microbatches)


class RecordingStage:
    """A stage that writes down what a single-stage schedule asks of it; nothing is sent."""

    def __init__(self, rank: int, pp: int) -> None:
        self.stage_index, self.num_stages = rank, pp
        self.group_size, self.group_rank = pp, rank
        self.is_first, self.is_last = False, False  # no loss to compute
        self.has_backward = True
        self.done: list[str] = []

    def forward_one_chunk(self, microbatch: int, *_: Any, **__: Any) -> None:
        self.done.append(f"{self.stage_index}F{microbatch}")

    def backward_one_chunk(self, microbatch: int, **_: Any) -> None:
        self.done.append(f"{self.stage_index}B{microbatch}")

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: []  # send, receive, reduce


def run_single_stage(name: str, rank: int, pp: int, microbatches: int) -> list[str]:
    """What a rank of GPipe or 1F1B does in one step, in order."""
    stage = RecordingStage(rank, pp)
    schedule: Any = get_schedule_class(NAMES[name])(stage, microbatches, loss_fn=lambda *_: None)  # type: ignore[arg-type]
    schedule._initialize_stage = lambda *_, **__: None
    schedule._step_microbatches()
    return stage.done
