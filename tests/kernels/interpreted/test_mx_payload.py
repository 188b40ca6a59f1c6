"""Payloads of MXFP8: made, taken apart, decoded and written to other ranks, bit for bit the plain formulas."""

from __future__ import annotations

import pytest
import torch

from moegraph.kernels import move_rows, mx_payload
from moegraph.ops.mx_format import mx_quantize
from moegraph.ops.mx_payload import mx_decode, mx_encode, mx_split
from moegraph.runtime.symmetric import Layout, Put
from tests.kernels.cases import ragged
from tests.kernels.fake_ranks import channels, exchange, expected_arrivals, planned
from tests.kernels.quantize_cases import awkward, mismatch


@pytest.mark.parametrize(
    ("rows", "width", "dtype"),
    [(33, 160, torch.float32), (3, 32, torch.bfloat16), (65, 96, torch.float32), (0, 32, torch.bfloat16)],
)
def test_rows_become_payloads(rows: int, width: int, dtype: torch.dtype) -> None:
    x = awkward(rows, width, dtype=dtype, subnormal=dtype == torch.float32)
    have = mx_payload.mx_encode(x)
    data, scale = mx_quantize(x)
    assert mismatch(have, torch.cat([data.view(torch.uint8), scale], 1)) == ""


def test_every_byte_and_every_scale_is_decoded() -> None:
    """Of every kind; what is subnormal in bf16 is left to a GPU: the interpreter misreads it."""
    elements = torch.arange(256, dtype=torch.uint8).expand(32, 256)
    scales = torch.tensor([*range(16), *range(120, 128), *range(248, 256)], dtype=torch.uint8)[:, None].expand(32, 8)
    payload = torch.cat([elements, scales], 1).contiguous()
    have, want = mx_payload.mx_decode(payload).float(), mx_decode(payload).float()
    same = (have == want) | (have.isnan() & want.isnan()) | ((want.abs() < 2.0**-126) & (have.abs() < 2.0**-126))
    assert same.all(), (~same).nonzero()[:8]
    assert int(want.isnan().sum()) == 256 + 2 * 31
    assert ((have.signbit() == want.signbit()) | want.isnan()).all()


@pytest.mark.parametrize(
    ("sizes", "tail", "width"),
    [((0, 1, 31, 32, 33), 5, 160), ((127, 128, 129), 0, 32), ((0, 0, 260, 0), 140, 64), ((0, 0), 3, 32)],
)
def test_payloads_become_operands(sizes: tuple[int, ...], tail: int, width: int) -> None:
    """Rows that do not exist may hold anything."""
    case = ragged(sizes, tail)
    payload = mx_encode(awkward(case.rows, width, dtype=torch.float32))
    payload[case.rows - tail :] = 0xFF
    for have, want in zip(mx_payload.mx_split(payload, case.offsets), mx_split(payload, case.offsets), strict=True):
        assert mismatch(have, want) == ""


def test_payloads_are_permuted_as_rows_are() -> None:
    payload = mx_encode(torch.randn(5, 64))
    inverse = torch.randperm(10).int()
    offsets = torch.tensor([4, 7], dtype=torch.int32)
    rows = move_rows.permute(payload, inverse, offsets, 2)
    want = torch.zeros_like(rows)
    want[inverse.long()] = payload.repeat_interleave(2, 0)
    want[7:] = 0
    assert torch.equal(rows, want)


@pytest.mark.parametrize(
    ("ranks", "width", "kind"), [(2, 64, "any"), (3, 32, "dropped"), (2, 96, "silent"), (2, 32, "one")]
)
def test_payloads_are_written_to_other_ranks_with_weights_and_without(ranks: int, width: int, kind: str) -> None:
    device, room = torch.device("cpu"), 20
    plain = planned(ranks, room, device, tokens=5, width=width, k=2, experts=6, kind=kind, dtype=torch.float32)
    plain[0].x[0, 3] = torch.nan
    parts = [part._replace(x=mx_encode(part.x)) for part in plain]
    layout = Layout(room, parts[0].x.shape[1], torch.uint8, torch.float32)
    out = channels(ranks, layout.bytes, device)
    rows, weights, origins = expected_arrivals(parts, room)
    for values in (True, False):
        sent = [
            Put(channel, layout, p.x, p.weights.reshape(-1) if values else None, p.destination, p.offsets, p.counts)
            for channel, p in zip(out, parts, strict=True)
        ]
        for rank, found in enumerate(exchange(sent)):
            assert mismatch(found[0], rows[rank]) == ""
            if values:
                assert torch.equal(found[1], weights[rank])
                assert torch.equal(found[2], origins[rank])
