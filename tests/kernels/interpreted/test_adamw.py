"""The one-pass AdamW in Triton's interpreter, against float64."""

from __future__ import annotations

import pytest
import torch

from moegraph.kernels.adamw import adamw, adamw_reference

OPTIONS = {"factor": 0.37, "lr": 0.02, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


@pytest.mark.parametrize("count", [1, 2047, 2048, 5000])
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("copied", [False, True])
def test_three_steps_are_those_of_the_reference(count: int, moments: torch.dtype, copied: bool) -> None:
    generator = torch.Generator().manual_seed(count)
    weight = torch.randn(count, generator=generator)
    mine = [weight.clone(), torch.zeros(count, dtype=moments), torch.zeros(count, dtype=moments)]
    want = [t.clone() for t in mine]
    copies = [torch.zeros(count), torch.zeros(count)] if copied else [None, None]
    for step in range(1, 4):
        grad = torch.randn(count, generator=generator)
        before = grad.clone()
        adamw(mine[0], grad, mine[1], mine[2], copies[0], step=step, **OPTIONS)
        adamw_reference(want[0], grad, want[1], want[2], copies[1], step=step, **OPTIONS)
        assert torch.equal(grad, before)
    tolerance = {"rtol": 2e-6, "atol": 1e-6} if moments == torch.float32 else {"rtol": 2e-2, "atol": 2e-3}
    for a, b in zip(mine, want, strict=True):
        torch.testing.assert_close(a, b, **tolerance)
    if copied:
        assert torch.equal(copies[0], mine[0])


def test_nothing_is_launched_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def launched(*given: object, **options: object) -> None:
        raise AssertionError("launched")

    monkeypatch.setattr("moegraph.kernels.adamw.adamw_launch", launched)
    empty = torch.empty(0)
    adamw(empty, empty, empty, empty, None, step=1, **OPTIONS)
    with pytest.raises(AssertionError, match="launched"):
        adamw(*[torch.ones(1)] * 4, None, step=1, **OPTIONS)
