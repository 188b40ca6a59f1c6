"""Where the scales of MXFP8 lie in memory for Blackwell's block-scaled matrix products, in plain torch.

Swizzled, a matrix of scales [N, C] is cut into blocks of 128 rows and 4 columns, of 512 contiguous bytes each: scale
(r, c) of a block is byte (r % 32) · 16 + (r // 32) · 4 + c. Blocks are ordered row after row; both sides are padded
with scale 0. (cuBLAS, "1D block scaling factors layout"; `SWIZZLE_32_4_4` of torch's scaled products.)

Ragged: rows are sorted by expert, `offsets[E]` (int32, on the device) are the inclusive ends of the experts' runs. An
expert's run is padded with zeros to *tiles* of 128 rows, so that no block of scales has two experts. How many tiles
there are depends on the routing, but never more than ceil(R / 128) + E = B, so what has padded rows has B · 128 of
them, and what no tile uses is zero. The host reads nothing.

    rows    scales [R, C] → [B · 128, 4 · ceil(C / 4)], each expert's blocks from its first tile on
    columns scales [R' / 32, K] of padded rows R' = B · 128, transposed to [K, R' / 32], whose blocks of 4 columns are
            tiles → [128 · ceil(K / 128), R' / 32], each expert's blocks together and row after row, as
            torch's grouped products with a ragged contraction read them

Legend: R rows, R' padded rows, E experts, K columns, B tiles.
"""

from __future__ import annotations

import torch
from torch import Tensor

TILE = 128  # rows of a block of swizzled scales
_COLUMNS = 4
_BLOCK_BYTES = TILE * _COLUMNS


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def swizzle_scales(scale: Tensor) -> Tensor:
    """scale [.., N, C] uint8 → [.., 128 · ceil(N / 128), 4 · ceil(C / 4)] swizzled, each matrix by itself."""
    *lead, n, c = scale.shape
    rows, columns = _up(n, TILE), _up(c, _COLUMNS)
    padded = scale.new_zeros(*lead, rows, columns)
    padded[..., :n, :c] = scale
    blocks = padded.reshape(*lead, rows // TILE, 4, 32, columns // _COLUMNS, _COLUMNS)
    return blocks.transpose(-4, -2).reshape(*lead, rows, columns)


def unswizzle_scales(swizzled: Tensor, rows: int, columns: int) -> Tensor:
    """What `swizzle_scales` made of [.., rows, columns], back.

    Raises ValueError where the padded sizes of [rows, columns] are not those of `swizzled`.
    """
    *lead, n, c = swizzled.shape
    if (n, c) != (_up(rows, TILE), _up(columns, _COLUMNS)):
        raise ValueError(f"swizzled scales {tuple(swizzled.shape)} are not those of {rows} rows and {columns} columns")
    blocks = swizzled.reshape(*lead, n // TILE, c // _COLUMNS, 32, 4, _COLUMNS)
    return blocks.transpose(-4, -2).reshape(*lead, n, c)[..., :rows, :columns]


def num_tiles(rows: int, num_experts: int) -> int:
    """B, the tiles of 128 rows that hold R = `rows` rows of the experts however they are routed."""
    return -(-rows // TILE) + num_experts


def zero_past(x: Tensor, offsets: Tensor) -> Tensor:
    """x [R, K] with zeros in rows past the last offset."""
    past = torch.arange(x.shape[0], dtype=torch.int32, device=x.device) >= offsets[-1]
    return x.masked_fill(past[:, None], 0.0)


def padded_offsets(offsets: Tensor) -> Tensor:
    """offsets [E] → the inclusive ends of the experts' runs among padded rows [E], int32; each a multiple of 128."""
    sizes = torch.diff(offsets, prepend=offsets.new_zeros(1))
    return ((sizes + TILE - 1) // TILE * TILE).cumsum(0).to(torch.int32)


def padded_place(offsets: Tensor, rows: int) -> Tensor:
    """Where each of R = `rows` rows lies among padded rows, int64 [R]; B · 128 for rows past the last offset."""
    row = torch.arange(rows, dtype=torch.int32, device=offsets.device)
    expert = torch.searchsorted(offsets, row, right=True).clamp_max(offsets.shape[0] - 1)
    place = row - offsets[expert] + padded_offsets(offsets)[expert] - _padding(offsets)[expert]
    return torch.where(row < offsets[-1], place, num_tiles(rows, offsets.shape[0]) * TILE).long()


def _padding(offsets: Tensor) -> Tensor:
    """How many rows of zeros follow each expert's rows, [E]."""
    sizes = torch.diff(offsets, prepend=offsets.new_zeros(1))
    return -sizes % TILE


def pad_rows(x: Tensor, offsets: Tensor) -> Tensor:
    """x [R, ...] → [B · 128, ...]: each expert's rows from a multiple of 128 on, zeros elsewhere."""
    rows = num_tiles(x.shape[0], offsets.shape[0]) * TILE
    padded = x.new_zeros(rows + 1, *x.shape[1:])
    padded[padded_place(offsets, x.shape[0])] = x
    return padded[:rows]


def swizzle_row_scales(scale: Tensor, offsets: Tensor) -> Tensor:
    """scale [R, C] uint8 of ragged rows → [B · 128, 4 · ceil(C / 4)]; rows past the last offset have none."""
    return swizzle_scales(pad_rows(scale, offsets))


def swizzle_column_scales(scale: Tensor, offsets: Tensor) -> Tensor:
    """scale [R' / 32, K] uint8 of padded rows → [128 · ceil(K / 128), R' / 32], expert after expert.

    Tiles that no expert uses follow, each by itself.
    """
    tiles, high = scale.shape[0] // _COLUMNS, -(-scale.shape[1] // TILE)
    blocks = swizzle_scales(scale.t()).reshape(high * tiles, _BLOCK_BYTES)
    placed = torch.empty_like(blocks)
    placed[_column_places(offsets, tiles, high)] = blocks
    return placed.reshape(high * TILE, scale.shape[0])


def unswizzle_column_scales(swizzled: Tensor, columns: int, offsets: Tensor) -> Tensor:
    """What `swizzle_column_scales` made of [R' / 32, K = `columns`], back; offsets of the runs, padded or not."""
    high, tiles = swizzled.shape[0] // TILE, swizzled.shape[1] // _COLUMNS
    blocks = swizzled.reshape(high * tiles, _BLOCK_BYTES)[_column_places(offsets, tiles, high)]
    return unswizzle_scales(blocks.reshape(high * TILE, swizzled.shape[1]), columns, swizzled.shape[1]).t()


def _column_places(offsets: Tensor, tiles: int, high: int) -> Tensor:
    """Where the blocks of scales along columns lie, int64: of `high` rows of blocks with a block for each tile, row
    after row, each expert's together."""
    ends = padded_offsets(offsets) // TILE
    tile = torch.arange(tiles, device=offsets.device)
    expert = torch.searchsorted(ends, tile.to(torch.int32), right=True)
    used = expert < offsets.shape[0]
    expert = expert.clamp_max(offsets.shape[0] - 1)
    starts = torch.cat((ends.new_zeros(1), ends[:-1]))
    start = torch.where(used, starts[expert], tile)
    wide = torch.where(used, (ends - starts)[expert], 1)
    place = start * high + torch.arange(high, device=offsets.device)[:, None] * wide + tile - start
    return place.reshape(-1)
