"""AdamW on a GPU: moegraph's one-pass kernel against torch's fused AdamW and against float64."""

from __future__ import annotations

import pytest
import torch

from moegraph.kernels.adamw import adamw, adamw_reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
OPTIONS = {"factor": 0.37, "lr": 0.02, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 4097, 1 << 20])
def test_steps_are_those_of_float64_and_the_copy_is_the_rounded_weight(moments: torch.dtype, count: int) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    weight = torch.randn(count, generator=generator, device="cuda")
    mine = [weight.clone(), *(torch.zeros(count, dtype=moments, device="cuda") for _ in range(2))]
    want = [t.clone() for t in mine]
    copy = torch.zeros(count, dtype=torch.bfloat16, device="cuda")
    for step in range(1, 6):
        grad = torch.randn(count, generator=generator, device="cuda")
        adamw(mine[0], grad, mine[1], mine[2], copy, step=step, **OPTIONS)
        adamw_reference(want[0], grad, want[1], want[2], None, step=step, **OPTIONS)
    tolerance = {"rtol": 5e-6, "atol": 2e-6} if moments == torch.float32 else {"rtol": 2e-2, "atol": 5e-3}
    torch.testing.assert_close(mine[0], want[0], **tolerance)
    assert torch.equal(copy, mine[0].bfloat16())
