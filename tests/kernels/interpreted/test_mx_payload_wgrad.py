"""Weight gradients that dequantise payloads as they load, in the interpreter: the bits of decoded rows in a product.

Sums of small integers are exact in any order, so bits can be compared with those of the operators on a CPU; in fp32, as
the interpreter does not round to bf16 but cuts off.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moegraph import ops
from moegraph.kernels import payload_wgrad
from moegraph.kernels.config import Config
from tests.kernels.cases import Ragged, ragged, relative_error

SMALL = Config(128, 128, 16, num_warps=4, num_stages=2)
CASES = {
    "the gradient": ("grad", 512, 40, SMALL),
    "the rows, runs of 8 columns": ("rows", 40, 512, replace(SMALL, num_warps=8)),
    "both": ("both", 512, 512, replace(SMALL, block_m=256, block_n=512)),
    "a wide tile of the gradient": ("grad", 512, 40, replace(SMALL, block_m=256, block_n=32)),
    "a whole width of the rows": ("rows", 16, 512, replace(SMALL, block_m=16, block_n=512)),
}


def operand(case: Ragged, width: int, low: bool, seed: int) -> Tensor:
    """Small integers times powers of two, exact in MXFP8; rows that do not exist are NaN, in bytes 0xFF throughout."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-8, 9, (case.rows, width), generator=generator).float()
    x = (x * 2.0 ** torch.randint(-1, 2, (case.rows, 1), generator=generator)).bfloat16()
    x = ops.mx_encode(x) if low else x
    x.view(torch.uint8)[case.rows - case.tail :] = 0xFF
    return x


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("case", [ragged((0, 1, 17), 9), ragged((16, 0), 0)], ids=["tail", "whole"])
def test_the_bits_are_those_of_decoded_rows_and_are_added_where_asked(name: str, case: Ragged) -> None:
    which, n, k, config = CASES[name]
    grad, rows = operand(case, n, which != "rows", 0), operand(case, k, which != "grad", 1)
    wide = [ops.mx_decode(each) if each.dtype == torch.uint8 else each for each in (grad, rows)]
    exact = ops.grouped_mm_wgrad(*(each.float() for each in wide), case.offsets)
    total = torch.full_like(exact, torch.nan)
    for times in (1, 2):
        payload_wgrad.payload_wgrad_into(grad, rows, case.offsets, total, accumulate=times > 1, config=config)
        assert torch.equal(total, exact * times)
    have = payload_wgrad.payload_wgrad(grad, rows, case.offsets, config=config)
    assert relative_error(have, exact) < 8e-3
    assert all((have[e] == 0).all() for e, size in enumerate(case.sizes) if size == 0)


@pytest.mark.parametrize("which", ["grad", "rows"])
def test_every_byte_and_every_kind_of_scale_is_what_decoding_makes_of_it(which: str) -> None:
    """An expert for each scale, with a row of all elements, times one; what is subnormal, and so is the
    least scale, is left to a GPU."""
    scales = torch.tensor([1, 7, 120, 127, 250, 254, 255], dtype=torch.uint8)
    elements = torch.arange(512, dtype=torch.int32).to(torch.uint8).expand(len(scales), 512)
    payload = torch.cat([elements, scales[:, None].expand(-1, 16)], 1).contiguous()
    offsets, ones = torch.arange(1, len(scales) + 1, dtype=torch.int32), torch.ones(len(scales), 16).bfloat16()
    pair = (payload, ones) if which == "grad" else (ones, payload)
    have = payload_wgrad.payload_wgrad(*pair, offsets, config=replace(SMALL, block_m=256, block_n=256))
    have = (have[:, :, 0] if which == "grad" else have[:, 0]).float()
    want = ops.mx_decode(payload).float()
    same = (have == want) | (have.isnan() & want.isnan()) | ((want.abs() < 2.0**-126) & (have.abs() < 2.0**-126))
    assert same.all(), (~same).nonzero()[:8]
    assert int(want.isnan().sum()) == 512 + 4 * (len(scales) - 1)


def test_payloads_that_no_descriptor_takes_are_refused() -> None:
    payload, offsets = ops.mx_encode(torch.zeros(3, 2880)), torch.tensor([3], dtype=torch.int32)
    with pytest.raises(ValueError, match="not of multiples of 512"):
        payload_wgrad.payload_wgrad(payload, torch.zeros(3, 16).bfloat16(), offsets)
    payload = ops.mx_encode(torch.zeros(3, 512))
    with pytest.raises(ValueError, match="do not have 32 to 512 columns"):
        payload_wgrad.payload_wgrad(payload, payload, offsets, config=replace(SMALL, block_n=16))
