"""Weight gradients that dequantise payloads as they load, on a GPU: bit for bit those of decoded rows, in any tile."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moegraph import ops
from moegraph.kernels import payload_wgrad, wgrad
from moegraph.kernels.config import Config, payload_wgrad_config
from moegraph.ops.payload_wgrad import payload_grouped_mm_wgrad, payload_grouped_mm_wgrad_add
from tests.kernels.quantize_cases import awkward, mismatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

SIZES = [(0, 1, 63, 64, 65, 700, 0, 129), (0,) * 8, (3000, 0, 0, 5, 0, 0, 0, 0), (512,) * 8]
OPERANDS = ["grad", "rows", "both"]
# The rule's tile, and others: eight warps, even and odd columns in runs of 8 and of 128.
TILES = [None, Config(128, 256, 64, flatten=True), Config(256, 128, 64), Config(64, 256, 64, num_warps=4)]


def turned(config: Config) -> Config:
    """The tile of the other side: for payloads of the rows."""
    return replace(config, block_m=config.block_n, block_n=config.block_m)


def problem(
    sizes: tuple[int, ...], n: int, k: int, which: str, seed: int = 0
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """(operands, the same decoded, offsets); 77 rows that do not exist hold NaN, as bytes of 0xFF."""
    generator = torch.Generator("cuda").manual_seed(seed)
    rows, given, wide = sum(sizes) + 77, [], []
    for width, name in ((n, "grad"), (k, "rows")):
        x = torch.randn(rows, width, device="cuda", generator=generator)
        x *= torch.exp2(torch.randint(-20, 20, (rows, 1), device="cuda", generator=generator).float())
        x = ops.mx_encode(x.bfloat16()) if which in (name, "both") else x.bfloat16()
        x.view(torch.uint8)[sum(sizes) :] = 0xFF
        given.append(x)
        wide.append(ops.mx_decode(x) if x.dtype == torch.uint8 else x)
    return given, wide, torch.tensor(sizes).cumsum(0).int().cuda()


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("which", OPERANDS)
@pytest.mark.parametrize("sizes", SIZES)
def test_bits_are_those_of_decoded_rows_in_the_plain_product(
    sizes: tuple[int, ...], which: str, tile: Config | None
) -> None:
    n, k = {"grad": (1024, 320), "rows": (272, 512), "both": (512, 1024)}[which]
    given, wide, offsets = problem(sizes, n, k, which)
    config = turned(tile) if tile is not None and which == "rows" else tile
    have = payload_wgrad.payload_wgrad(*given, offsets, config=config)
    want = wgrad.wgrad(*wide, offsets)
    assert mismatch(have, want) == ""
    assert torch.isfinite(have).all()
    assert all((have[e] == 0).all() for e, size in enumerate(sizes) if size == 0)
    into, then = (torch.full(have.shape, torch.nan, device="cuda") for _ in range(2))
    for accumulate in (False, True, True):
        payload_wgrad.payload_wgrad_into(*given, offsets, into, accumulate=accumulate, config=config)
        wgrad.wgrad_into(*wide, offsets, then, accumulate=accumulate)
    assert torch.equal(into, then)


@pytest.mark.parametrize("which", ["grad", "rows"])
def test_every_element_with_every_scale_is_what_decoding_makes_of_it(which: str) -> None:
    """An expert for each scale: its row holds every element. NaN where that is, and subnormal numbers too."""
    elements = torch.arange(512, device="cuda").to(torch.uint8).expand(256, 512)
    scales = torch.arange(256, device="cuda").to(torch.uint8)[:, None].expand(256, 16)
    payload, ones = torch.cat([elements, scales], 1).contiguous(), torch.ones(256, 64, device="cuda").bfloat16()
    offsets = torch.arange(1, 257, dtype=torch.int32, device="cuda")
    given = (payload, ones) if which == "grad" else (ones, payload)
    wide = [ops.mx_decode(each) if each is payload else each for each in given]
    have, want = payload_wgrad.payload_wgrad(*given, offsets), wgrad.wgrad(*wide, offsets)
    assert torch.equal(have.isnan(), want.isnan())
    assert int(have.isnan().sum()) == 64 * (255 * 4 + 512)
    assert mismatch(have.nan_to_num(nan=0.0), want.nan_to_num(nan=0.0)) == ""


def test_rows_with_all_that_is_awkward_give_the_same_nan_and_the_same_bits() -> None:
    x = ops.mx_encode(awkward(300, 1024, dtype=torch.bfloat16).cuda())
    grad = torch.randn(300, 256, device="cuda").bfloat16()
    offsets = torch.tensor([10, 10, 200, 300], dtype=torch.int32, device="cuda")
    have, want = payload_wgrad.payload_wgrad(grad, x, offsets), wgrad.wgrad(grad, ops.mx_decode(x), offsets)
    assert torch.equal(have.isnan(), want.isnan())
    assert have.isnan().any()
    assert mismatch(have.nan_to_num(nan=0.0), want.nan_to_num(nan=0.0)) == ""


@pytest.mark.parametrize("which", ["grad", "rows"])
def test_a_large_product_has_the_same_bits_many_times_beside_other_work(which: str) -> None:
    """Nothing of a step's operand may be overwritten while the product of the step before reads it."""
    n, k = (4096, 1024) if which == "grad" else (1024, 4096)
    given, wide, offsets = problem((2048, 100, 4000, 0, 1948, 1000, 3000, 4288), n, k, which)
    want = wgrad.wgrad(*wide, offsets)
    other, busy = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda").bfloat16()
    for turn in range(20):
        if turn % 2:
            with torch.cuda.stream(other):
                busy @ busy
        assert mismatch(payload_wgrad.payload_wgrad(*given, offsets), want) == ""


@pytest.mark.parametrize("which", OPERANDS)
def test_the_operator_gives_these_bits_whatever_it_runs_and_nothing_waits(which: str) -> None:
    for n, k in ((2048, 1024), (2880, 1024), (512, 2880)):
        given, wide, offsets = problem(SIZES[0], n, k, which)
        flag, into = torch.tensor([1], dtype=torch.int32), torch.ones(8, n, k, device="cuda")
        then = into.clone()
        payload_grouped_mm_wgrad(*given, offsets)
        payload_grouped_mm_wgrad_add(into.clone(), flag, *given, offsets)
        torch.cuda.set_sync_debug_mode("error")
        try:
            have = payload_grouped_mm_wgrad(*given, offsets)
            payload_grouped_mm_wgrad_add(into, flag, *given, offsets)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert mismatch(have, ops.grouped_mm_wgrad(*wide, offsets)) == ""
        ops.grouped_mm_wgrad_add(then, flag, *wide, offsets)
        assert torch.equal(into, then)


def test_the_rule_has_two_programs_to_a_multiprocessor_on_hopper() -> None:
    assert payload_wgrad_config(2048, 1024, False, 90).num_warps == 4
