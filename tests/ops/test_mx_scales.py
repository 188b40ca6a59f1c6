"""Swizzled scales byte by byte, of matrices and of ragged rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torchao.prototype.mx_formats.utils import to_blocked

from moegraph.ops import mx_scales

SIZES = [(1, 31, 32, 33, 0, 44, 64, 3), (0, 1, 127, 128, 129), (0, 0, 300, 0), (256, 128), (0, 0)]


def some(*shape: int) -> Tensor:
    return torch.randint(1, 256, shape, generator=torch.Generator().manual_seed(0)).to(torch.uint8)


def place(row: int, column: int, columns: int) -> int:
    """The byte of scale (row, column) of a matrix with `columns` columns, a multiple of 4."""
    block = (row // 128) * (columns // 4) + column // 4
    return block * 512 + (row % 32) * 16 + (row % 128 // 32) * 4 + column % 4


def offsets_of(sizes: tuple[int, ...]) -> Tensor:
    return torch.tensor(sizes).cumsum(0).to(torch.int32)


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (32, 4), (130, 7), (256, 12), (0, 4)])
def test_where_each_scale_of_a_matrix_lies(rows: int, columns: int) -> None:
    scale = some(2, rows, columns)
    swizzled = mx_scales.swizzle_scales(scale)
    wide = -(-columns // 4) * 4
    assert swizzled.shape == (2, -(-rows // 128) * 128, wide)
    for matrix in range(2):
        want = torch.zeros(swizzled[0].numel(), dtype=torch.uint8)
        for r in range(rows):
            for c in range(columns):
                want[place(r, c, wide)] = scale[matrix, r, c]
        assert torch.equal(swizzled[matrix].flatten(), want)
    assert torch.equal(mx_scales.unswizzle_scales(swizzled, rows, columns), scale)


@pytest.mark.parametrize(("rows", "columns"), [(128, 4), (130, 7), (384, 64)])
def test_torchao_lays_scales_out_the_same(rows: int, columns: int) -> None:
    scale = some(rows, columns)
    assert torch.equal(mx_scales.swizzle_scales(scale).flatten(), to_blocked(scale).flatten())


def test_other_sizes_do_not_unswizzle() -> None:
    with pytest.raises(ValueError, match="129 rows and 4 columns"):
        mx_scales.unswizzle_scales(some(128, 4), 129, 4)


@pytest.mark.parametrize("tail", [0, 5])
@pytest.mark.parametrize("sizes", SIZES)
def test_padded_rows_start_at_tiles(sizes: tuple[int, ...], tail: int) -> None:
    offsets, rows = offsets_of(sizes), sum(sizes) + tail
    x = torch.arange(1.0, rows + 1)[:, None].expand(rows, 3)
    padded, ends = mx_scales.pad_rows(x, offsets), mx_scales.padded_offsets(offsets)
    assert ends.dtype == torch.int32
    assert padded.shape[0] == mx_scales.num_tiles(rows, len(sizes)) * 128
    want, first, at = torch.zeros_like(padded), 0, 0
    for e, size in enumerate(sizes):
        want[at : at + size] = x[first : first + size]
        first, at = first + size, at + -(-size // 128) * 128
        assert ends[e] == at
    assert torch.equal(padded, want)
    assert at <= padded.shape[0]


@pytest.mark.parametrize("sizes", SIZES)
def test_row_scales_of_each_expert_are_swizzled_by_themselves(sizes: tuple[int, ...]) -> None:
    offsets, rows = offsets_of(sizes), sum(sizes) + 7
    scale = some(rows, 5)
    have = mx_scales.swizzle_row_scales(scale, offsets)
    assert have.shape == (mx_scales.num_tiles(rows, len(sizes)) * 128, 8)
    first = at = 0
    for size in sizes:
        own = mx_scales.swizzle_scales(scale[first : first + size])
        assert torch.equal(have[at : at + own.shape[0]], own)
        first, at = first + size, at + own.shape[0]
    assert not have[at:].any()


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("columns", [32, 200])
def test_column_scales_of_each_expert_are_swizzled_by_themselves(sizes: tuple[int, ...], columns: int) -> None:
    offsets, tiles = offsets_of(sizes), mx_scales.num_tiles(sum(sizes), len(sizes))
    scale = some(tiles * 4, columns)
    have = mx_scales.swizzle_column_scales(scale, offsets)
    assert have.shape == (-(-columns // 128) * 128, tiles * 4)
    flat, first, at = have.flatten(), 0, 0
    for size in sizes:
        high = -(-size // 128) * 4
        own = mx_scales.swizzle_scales(scale[first : first + high].t()).flatten()
        assert torch.equal(flat[at : at + own.numel()], own)
        first, at = first + high, at + own.numel()
