"""Moving and quantising in one kernel, bit for bit `permute` and then the plain formulas."""

from __future__ import annotations

import pytest
import torch

from moegraph import ops
from moegraph.kernels import permute_quantize
from moegraph.ops import fp8_format, mx_scales
from moegraph.ops.mx_format import mx_quantize
from tests.kernels.quantize_cases import awkward, mismatch

# tokens, experts, top-k, of which a share of choices is dropped, columns
CASES = [(20, 3, 8, 0.0, 160), (8, 5, 3, 0.3, 2080), (3, 2, 1, 1.0, 32), (0, 2, 2, 0.0, 32)]


def routed(tokens: int, experts: int, top_k: int, dropped: float) -> tuple[torch.Tensor, ...]:
    """The metadata of random choices: the last expert but one has none, the last one most: of 160 rows two tiles."""
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(0, 10 * experts, (tokens, top_k), generator=generator, dtype=torch.int32)
    ids = torch.where((ids >= experts) | (ids == experts - 2), experts - 1, ids)
    return ops.sort_by_expert(torch.where(torch.rand(ids.shape, generator=generator) < dropped, -1, ids), experts)


def test_a_case_has_an_expert_of_two_tiles_behind_one_of_less() -> None:
    sizes = routed(*CASES[0][:4])[2].diff(prepend=torch.zeros(1, dtype=torch.int32)).tolist()
    assert 0 < sizes[0] < 128 < sizes[-1]


@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize(("tokens", "experts", "top_k", "dropped", "columns"), CASES)
def test_mx_rows(tokens: int, experts: int, top_k: int, dropped: float, columns: int, swizzled: bool) -> None:
    order, inverse, offsets = routed(tokens, experts, top_k, dropped)
    x = awkward(tokens, columns, dtype=torch.float32)
    data, scale = permute_quantize.mx_permute_quantize(x, inverse, offsets, top_k, swizzled=swizzled)
    want, want_scale = mx_quantize(ops.permute(x, order, inverse, offsets, top_k=top_k), -1)
    assert mismatch(data, want) == ""
    want_scale = mx_scales.swizzle_row_scales(want_scale, offsets) if swizzled else want_scale
    assert mismatch(scale, want_scale) == ""


@pytest.mark.parametrize(("tokens", "experts", "top_k", "dropped", "columns"), [*CASES, (5, 3, 2, 0.2, 8200)])
def test_fp8_rows(tokens: int, experts: int, top_k: int, dropped: float, columns: int) -> None:
    """A row of 8200 elements is read twice."""
    order, inverse, offsets = routed(tokens, experts, top_k, dropped)
    x = awkward(tokens, columns, dtype=torch.bfloat16, subnormal=False).nan_to_num(1.0, 2.0, 3.0)
    x[1::2, -1] = 2 * x[1::2].abs().amax(-1)
    x[3:4, 5] = float("nan")
    have = permute_quantize.fp8_permute_quantize(x, inverse, offsets, top_k)
    want = fp8_format.quantize_rows(ops.permute(x, order, inverse, offsets, top_k=top_k), offsets)
    for a, b in zip(have, want, strict=True):
        assert mismatch(a, b) == ""


@pytest.mark.parametrize("columns", [128, 384, 2176])
@pytest.mark.parametrize(("tokens", "experts", "top_k", "dropped"), [case[:4] for case in CASES])
def test_fp8_rows_in_blocks(tokens: int, experts: int, top_k: int, dropped: float, columns: int) -> None:
    order, inverse, offsets = routed(tokens, experts, top_k, dropped)
    x = awkward(tokens, columns, dtype=torch.bfloat16, subnormal=False)
    have = permute_quantize.blocks_permute_quantize(x, inverse, offsets, top_k)
    want = ops.fp8_quantize_blocks(ops.permute(x, order, inverse, offsets, top_k=top_k), offsets)
    for a, b in zip(have, want, strict=True):
        assert mismatch(a, b) == ""


def test_a_row_without_columns_still_has_its_scale() -> None:
    _, inverse, offsets = routed(4, 3, 2, 0.0)
    data, scale = permute_quantize.fp8_permute_quantize(torch.empty(4, 0), inverse, offsets, 2)
    assert data.shape == (8, 0)
    assert (scale == 1).all()
