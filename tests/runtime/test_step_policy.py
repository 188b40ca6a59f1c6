"""Which steps are accepted, from their numbers alone; and the checksum by which replicas are compared."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moegraph.runtime.replicas import checksum
from moegraph.runtime.step_policy import StepPolicy
from moegraph.specs.schema.run import SkipSpikes, Train


def policy(**given: Any) -> StepPolicy:
    return StepPolicy(Train(steps=1, tokens_per_step=1, **given))


def record(loss: float = 5.0, norm: float = 1.0, **others: float) -> dict[str, float]:
    return {"loss": loss, "balance_loss": 0.0, "z_loss": 0.0, "grad_norm": norm, **others}


def filled(**given: Any) -> StepPolicy:
    """Eight accepted steps with losses 5 ± 0.1 and norms 1 ± 0.1, so both deviations are 0.1."""
    one = policy(skip_spikes=SkipSpikes(window=8, deviations=6.0), **given)
    for i in range(8):
        one.accept(5.0 + 0.1 * (-1) ** i, 1.0 + 0.1 * (-1) ** i)
    return one


@pytest.mark.parametrize(
    ("loss", "norm", "why"),
    [
        (5.59, 1.59, None),
        (5.61, 1.0, "loss is 5.61, above 5.6"),
        (5.0, 1.61, "grad_norm is 1.61, above 1.6"),
        (0.0, 0.0, None),
    ],
)
def test_a_spike_is_what_lies_that_many_deviations_above_the_mean(loss: float, norm: float, why: str | None) -> None:
    assert filled().why_skip(record(loss, norm)) == why


def test_half_of_the_window_has_to_be_there() -> None:
    one = policy(skip_spikes=SkipSpikes(window=8))
    for accepted in range(4):
        assert one.why_skip(record(1e9)) is None, accepted
        one.accept(5.0, 1.0)
    assert one.why_skip(record(1e9)) is not None


def test_a_skipped_step_is_not_part_of_what_the_next_is_held_against() -> None:
    one = filled()
    for _ in range(3):
        assert one.why_skip(record(50.0)) is not None
        one.skip()
    assert list(one.losses) == list(filled().losses)


@pytest.mark.parametrize("name", ["loss", "balance_loss", "z_loss", "grad_norm"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_skipped_if_so_asked_only(name: str, value: float) -> None:
    bad = {**record(), name: value}
    assert policy(non_finite="skip").why_skip(bad) == f"{name} is {value}"
    for other in ("stop", "dump"):
        assert filled(non_finite=other).why_skip(bad) is None


def test_skips_in_a_row_are_counted_from_the_last_accepted_step() -> None:
    one = policy(non_finite="skip", max_skips=2)
    assert [one.skip(), one.skip()] == [True, True]
    one.accept(5.0, 1.0)
    assert [one.skip(), one.skip(), one.skip()] == [True, True, False]
    assert (one.skipped, one.in_a_row) == (5, 3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_checksum_sees_one_bit_and_an_exchange(dtype: torch.dtype) -> None:
    value = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).to(dtype)
    sums = {int(checksum(value))}
    for place in range(0, value.numel() * value.element_size(), 3):
        for bit in (1, 128):
            changed = value.clone()
            changed.view(-1).view(torch.uint8)[place] ^= bit
            sums.add(int(checksum(changed)))
    assert len(sums) == 1 + 2 * len(range(0, value.numel() * value.element_size(), 3))
    assert int(checksum(value.flip(0))) not in sums
    assert int(checksum(value.t().contiguous().t())) == int(checksum(value))
