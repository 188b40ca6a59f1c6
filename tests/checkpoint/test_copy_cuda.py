"""The copy of a GPU's state, which goes on while the next step is computed."""

from __future__ import annotations

import pytest
import torch

from moegraph.checkpoint.names import Segment
from moegraph.checkpoint.shard_writer import HostCopy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

_ELEMENTS = 1 << 28  # 1 GiB: tens of milliseconds to copy, less than one to change


def _state() -> dict[Segment, torch.Tensor]:
    ramp = torch.arange(_ELEMENTS, device="cuda", dtype=torch.float32)
    small = torch.ones(7, device="cuda").bfloat16()
    return {Segment("master.a", 0, _ELEMENTS): ramp, Segment("exp_avg.a", 0, 7): small}


def test_a_change_that_is_held_does_not_reach_a_copy_that_goes_on() -> None:
    copy, state = HostCopy(), _state()
    copy.begin(state)  # its memory is made and pinned
    copy.wait()
    before = {segment: tensor.cpu() for segment, tensor in state.items()}
    copies = copy.begin(state)
    going_on = not copy.complete
    copy.hold()
    for tensor in state.values():
        tensor.neg_().sub_(1)
    copy.wait()
    assert going_on, "begin() waited for the copy"
    assert all(torch.equal(copies[segment], tensor) for segment, tensor in before.items())
    assert not any(torch.equal(copies[segment], tensor.cpu()) for segment, tensor in state.items())


def test_a_copy_begins_when_what_was_launched_before_it_has_ended() -> None:
    copy, state = HostCopy(), _state()
    copy.begin(state)
    copy.wait()
    a = torch.randn(8192, 8192, device="cuda")
    for _ in range(20):
        a @ a
    for tensor in state.values():
        tensor.mul_(3)
    copies = copy.begin(state)
    copy.wait()
    assert all(torch.equal(copies[segment], tensor.cpu()) for segment, tensor in state.items())
