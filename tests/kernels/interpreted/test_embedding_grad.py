"""The gradient of an embedding, added to what is there, against float64."""

from __future__ import annotations

import pytest
import torch

from moegraph.kernels.embedding_grad import embedding_grad_into
from tests.kernels.cases import relative_error

IDS = {
    "all one": torch.full((21,), 5),
    "all different": torch.arange(21).flip(0),
    "runs of one step, of less and of more": torch.tensor([3] * 8 + [0] * 7 + [22] * 9 + [1] * 17 + [4]),
    "a single token": torch.tensor([0]),
}


@pytest.mark.parametrize("name", IDS)
@pytest.mark.parametrize(("width", "dtype", "wide"), [
    (16, torch.bfloat16, torch.float32), (520, torch.float32, torch.float32), (40, torch.float64, torch.float64)
])  # fmt: skip
@pytest.mark.parametrize("accumulate", [False, True])
def test_each_row_gets_the_sum_over_its_tokens(
    name: str, width: int, dtype: torch.dtype, wide: torch.dtype, accumulate: bool
) -> None:
    torch.manual_seed(0)
    ids = IDS[name][torch.randperm(len(IDS[name]))]
    grad = torch.randn(len(ids), width).to(dtype)
    into = torch.randn(23, width, dtype=wide)
    want = into.double() if accumulate else torch.zeros(23, width, dtype=torch.float64)
    want = want.index_add(0, ids, grad.double())
    untouched = [row for row in range(23) if row not in ids]
    before = into.clone()
    embedding_grad_into(grad, ids, into, accumulate=accumulate)
    assert relative_error(into, want) <= {torch.float32: 1e-6, torch.float64: 1e-15}[wide]
    assert torch.equal(into[untouched], before[untouched] if accumulate else torch.zeros_like(into[untouched]))


def test_no_tokens_leave_a_gradient_of_zero_or_the_one_that_was_there() -> None:
    into = torch.ones(3, 16)
    embedding_grad_into(torch.empty(0, 16), torch.empty(0, dtype=torch.int64), into, accumulate=True)
    assert (into == 1).all()
    embedding_grad_into(torch.empty(0, 16), torch.empty(0, dtype=torch.int64), into, accumulate=False)
    assert (into == 0).all()
