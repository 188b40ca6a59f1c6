"""The weight gradient of payloads as an operator: on CPU the bits of decoded rows; what a card runs, and why."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moegraph import ops
from moegraph.kernels.chips import Card
from moegraph.ops.payload_wgrad import payload_backend, payload_grouped_mm_wgrad, payload_grouped_mm_wgrad_add
from tests.kernels.cases import ragged
from tests.kernels.quantize_cases import mismatch

N, K = 64, 96
CASE = ragged((0, 5, 1, 30, 0), 7)
HOPPER, BLACKWELL = Card("Test Hopper", 90), Card("Test Blackwell", 103)


def operands(which: str) -> tuple[tuple[Tensor, Tensor], list[Tensor]]:
    """(gradient, rows), payloads where `which` says so, and both in bf16. Rows that do not exist are NaN."""
    generator = torch.Generator().manual_seed(0)
    given, wide = [], []
    for width, name in ((N, "grad"), (K, "rows")):
        x = torch.randn(CASE.rows, width, generator=generator).bfloat16()
        x[CASE.rows - CASE.tail :] = torch.nan
        given.append(ops.mx_encode(x) if which in (name, "both") else x)
        wide.append(ops.mx_decode(given[-1]) if which in (name, "both") else x)
    return (given[0], given[1]), wide


@pytest.mark.parametrize("which", ["grad", "rows", "both"])
def test_it_is_the_weight_gradient_of_decoded_rows_bit_for_bit(which: str) -> None:
    given, wide = operands(which)
    want = ops.grouped_mm_wgrad(*wide, CASE.offsets)
    assert mismatch(payload_grouped_mm_wgrad(*given, CASE.offsets), want) == ""
    assert torch.isfinite(want).all()
    for keep in (0, 1):
        have, then = (torch.full((len(CASE.sizes), N, K), 3.0) for _ in range(2))
        flag = torch.tensor([keep], dtype=torch.int32)
        assert payload_grouped_mm_wgrad_add(have, flag, *given, CASE.offsets).shape == (0,)
        ops.grouped_mm_wgrad_add(then, flag, *wide, CASE.offsets)
        assert torch.equal(have, then)


def test_what_is_no_payload_or_does_not_fit_is_refused() -> None:
    (payload, rows), (grad, _) = operands("grad")
    for pair, message in (
        ((grad, rows), "neither operand is a payload"),
        ((payload[:, :-1], rows), "is no payload"),
        ((payload, rows.float()), "neither a payload nor rows in bf16"),
        ((payload[1:], rows), "42 rows of grad and 43 of rows"),
    ):
        with pytest.raises(ValueError, match=message):
            payload_grouped_mm_wgrad(*pair, CASE.offsets)


@pytest.mark.parametrize(
    ("n", "k", "payloads", "card", "backend", "reason"),
    [
        (2048, 256, (True, False), HOPPER, "triton", "to decode is predicted to take 94% of the product"),
        (2048, 1024, (True, False), HOPPER, "decode", "to decode is predicted to take 24% of the product"),
        (4096, 2048, (False, True), HOPPER, "decode", "to decode is predicted to take 6% of the product"),
        (2048, 512, (True, True), HOPPER, "triton", "to decode is predicted to take 59% of the product"),
        (2880, 1024, (True, False), HOPPER, "decode", "rows of 2880 elements are no whole multiples of 512"),
        (2048, 1020, (True, False), HOPPER, "decode", "which is not moegraph's kernel: rows of 2048 and 1020 elements"),
        (2048, 1024, (True, False), BLACKWELL, "decode", "have not been measured on it"),
        (2048, 1024, (True, False), torch.device("cpu"), "decode", "no CUDA device"),
    ],
)
def test_a_card_dequantises_in_the_product_where_a_copy_is_predicted_to_cost_more(
    n: int, k: int, payloads: tuple[bool, bool], card: Card | torch.device, backend: str, reason: str
) -> None:
    found, why = payload_backend(n, k, 65536, 32, payloads, card)
    assert found == backend
    assert reason in why
