"""Payloads of MXFP8: bit for bit what quantising and dequantising the rows gives, through whatever moves rows."""

from __future__ import annotations

import math

import pytest
import torch

from moegraph import ops
from moegraph.ops.mx_payload import payload_bytes, payload_width
from tests.kernels.quantize_cases import awkward, mismatch


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_trip_as_bytes_changes_nothing_that_quantising_had_not(dtype: torch.dtype) -> None:
    x = awkward(40, 96, dtype=dtype)
    data, scale = ops.mx_quantize(x)
    payload = ops.mx_encode(x)
    assert payload.dtype == torch.uint8
    assert payload.shape == (40, payload_bytes(96)) == (40, 99)
    assert mismatch(ops.mx_decode(payload), ops.mx_dequantize(data, scale)) == ""


def test_a_row_with_nan_arrives_with_nan_and_zeros_arrive_as_zeros() -> None:
    x = torch.ones(3, 64, dtype=torch.bfloat16)
    x[1, 40], x[2] = math.nan, 0.0
    order = torch.tensor([2, 0, 1], dtype=torch.int32)
    moved = ops.permute(ops.mx_encode(x), order, torch.tensor([1, 2, 0], dtype=torch.int32), order[:1] + 1, top_k=1)
    rows = ops.mx_decode(ops.unpack_rows(moved, torch.tensor([3], dtype=torch.int32), ranks=1, count=4))
    assert not rows[0].any()  # the row of zeros, and one past the last
    assert not rows[3].any()
    assert torch.equal(rows[1], x[0])
    assert rows[2, 32:].isnan().all()
    assert torch.equal(rows[2, :32], x[1, :32])


@pytest.mark.parametrize("width", [32, 256])
def test_payloads_are_packed_into_buckets_as_rows_are(width: int) -> None:
    """Rows of 33 bytes, and of 264, which are whole words."""
    payload, offsets = ops.mx_encode(torch.randn(9, width)), torch.tensor([1, 4, 4, 8], dtype=torch.int32)
    packed = ops.pack_rows(payload, offsets, ranks=2, capacity=3)
    assert packed.dtype == torch.uint8
    assert torch.equal(packed, ops.pack_rows(payload.double(), offsets, ranks=2, capacity=3).byte())


@pytest.mark.parametrize(("sizes", "tail"), [((0, 1, 31, 33), 5), ((127, 129, 0), 0), ((0, 0), 3)])
@pytest.mark.parametrize("width", [32, 160])
def test_an_operand_is_that_of_the_rows_and_reads_none_that_do_not_exist(
    sizes: tuple[int, ...], tail: int, width: int
) -> None:
    offsets = torch.tensor(sizes).cumsum(0).int()
    x = awkward(sum(sizes) + tail, width, dtype=torch.bfloat16)
    payload = ops.mx_encode(x)
    payload[sum(sizes) :] = 0xFF
    for have, want in zip(ops.mx_split(payload, offsets), ops.mx_quantize_rows(x, offsets, swizzled=True), strict=True):
        assert mismatch(have, want) == ""


def test_quantising_what_was_decoded_gives_the_same_values_again() -> None:
    """So a product that takes the payload computes with the numbers of one that quantises decoded rows."""
    once = ops.mx_decode(ops.mx_encode(torch.randn(64, 64)))
    assert torch.equal(ops.mx_decode(ops.mx_encode(once)), once)


def test_what_is_no_payload_is_refused() -> None:
    with pytest.raises(ValueError, match="33 bytes for every 32"):
        payload_width(torch.zeros(2, 64, dtype=torch.uint8))
    with pytest.raises(ValueError, match="33 bytes for every 32"):
        ops.mx_decode(torch.zeros(2, 33))
    with pytest.raises(ValueError, match="not a multiple of 32"):
        ops.mx_encode(torch.zeros(2, 33))
    with pytest.raises(ValueError, match="float64"):
        ops.mx_encode(torch.zeros(2, 32, dtype=torch.float64))
