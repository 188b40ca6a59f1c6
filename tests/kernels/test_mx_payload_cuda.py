"""Payloads of MXFP8 on a GPU: bit for bit the plain formulas on the CPU, and written to other ranks without waiting."""

from __future__ import annotations

import pytest
import torch

from moegraph import ops
from tests.kernels.cases import ragged
from tests.kernels.quantize_cases import awkward, mismatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("rows", "width"), [(300, 2880), (33, 4096), (1, 32), (0, 64)])
def test_payloads_are_those_of_the_cpu_and_decode_alike(rows: int, width: int, dtype: torch.dtype) -> None:
    x = awkward(rows, width, dtype=dtype)
    want = ops.mx_encode(x)
    have = ops.mx_encode(x.cuda())
    assert mismatch(have.cpu(), want) == ""
    again, expected = ops.mx_decode(have).cpu(), ops.mx_decode(want)
    assert torch.equal(again.isnan(), expected.isnan())
    assert mismatch(again.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0)) == ""


def test_every_element_is_decoded_with_every_scale() -> None:
    elements = torch.arange(256, dtype=torch.uint8).expand(256, 256)
    scales = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 8)
    payload = torch.cat([elements, scales], 1).contiguous()
    have, want = ops.mx_decode(payload.cuda()).cpu(), ops.mx_decode(payload)
    assert torch.equal(have.isnan(), want.isnan())
    assert mismatch(have.nan_to_num(nan=0.0), want.nan_to_num(nan=0.0)) == ""


@pytest.mark.parametrize("width", [4096, 2880, 32])
@pytest.mark.parametrize("sizes", [(0, 1, 127, 128, 129, 300, 0, 0), (64,) * 8, (0,) * 8, (5, 0, 0, 0, 0, 0, 0, 0)])
def test_operands_are_those_of_the_rows_themselves(sizes: tuple[int, ...], width: int) -> None:
    case = ragged(sizes, 200)
    x = awkward(case.rows, width, dtype=torch.bfloat16)
    payload = ops.mx_encode(x)
    payload[sum(sizes) :] = 0xFF
    want = ops.mx_quantize_rows(x, case.offsets, swizzled=True)
    for a, b in zip(ops.mx_split(payload.cuda(), case.offsets.cuda()), want, strict=True):
        assert mismatch(a.cpu(), b) == ""


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("width", [4096, 2880])
def test_ranks_that_share_a_gpu_get_the_bytes_that_were_sent_and_nobody_waits(ranks: int, width: int) -> None:
    from moegraph.runtime.symmetric import Layout, Put
    from tests.kernels.fake_ranks import channels, exchange, expected_arrivals, planned

    device, tokens, k = torch.device("cuda"), 500, 4
    room = tokens * k
    case = {"tokens": tokens, "width": width, "k": k, "experts": 32, "kind": "dropped", "dtype": torch.bfloat16}
    parts = [part._replace(x=ops.mx_encode(part.x)) for part in planned(ranks, room, device, **case)]
    layout = Layout(room, parts[0].x.shape[1], torch.uint8, torch.float32)
    out = channels(ranks, layout.bytes, device)
    sent = [
        Put(channel, layout, p.x, p.weights.reshape(-1), p.destination, p.offsets, p.counts)
        for channel, p in zip(out, parts, strict=True)
    ]
    exchange(sent)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = exchange(sent)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for got, *expected in zip(found, *expected_arrivals(parts, room), strict=True):
        assert all(mismatch(a, b) == "" for a, b in zip(got, expected, strict=True))


def test_permuted_payloads_are_those_of_the_cpu() -> None:
    payload = ops.mx_encode(torch.randn(100, 2880))
    ids = torch.rand(100, 16).topk(4, -1).indices.int()
    ids[::3, 0] = -1
    where = ops.sort_by_expert(ids, 16)
    want = ops.permute(payload, *where, top_k=4)
    have = ops.permute(payload.cuda(), *(each.cuda() for each in where), top_k=4)
    assert mismatch(have.cpu(), want) == ""
