"""Rows written straight into the memory of other ranks, over NVLink, and taken from one's own.

    put_rows      x[t] → buffer of rank p, row d,   for each slot s = t·K + j with destination[s] = p·N + d
    take_rows     buffer → rows [N, D]              zeros past the last offset; a copy, so that the buffer is free again
    send_back     y[n] → slots of rank p, slot s,   for each row n that exists, with origin[n] = p·R + s
    sum_slots     out[t] = Σ_j slots[t·K + j]       in fp32, in slot order; slots without a destination are not read

Both ways rows are written, never read, across the link. A store is on its way as soon as it is issued, so a few warps
fill the link (358 GB/s of 450 with 264 programs on H200); a load keeps its warp waiting for a round trip of some 2 µs,
and the results would have to be copied into shared memory first. So the way home also writes, into a buffer that has a
place for every slot, and the sum over K reads local memory only. Going out, a token's row is read once and stored K
times.

With its row travel the router's weight, and the number of the slot it came from (`origin`), by which it is sent back.
Rows may be payloads of MXFP8 (`moegraph.ops.mx_payload`): uint8, elements and scales of a row together, half the bytes.
Addresses of the ranks' buffers are an int64 table [P]; a buffer is [rows | values | origins], each aligned to 16 bytes.

Legend: T tokens, D width, K top-k, R = T·K slots, P ranks, N rows of a buffer, L experts of a rank.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moegraph.kernels.config import Config
from moegraph.kernels.launch import Launch, persistent_programs

_WIDTH = 4096  # columns at a time, twice as many bytes: 8 warps move them in two 16-byte vectors per thread
_CONFIG = Config(num_warps=8)
_PER_PROCESSOR = 2  # programs; row_put.py on H200: 32 programs in all reach 315 GB/s, 264 reach 358


@triton.jit
def peer_row(table_ptr, peer, row, like_ptr, D: tl.constexpr):
    """The address of a row in a peer's buffer. D elements are a multiple of 16 bytes, or nothing is promised."""
    base = tl.load(table_ptr + peer).to(like_ptr.dtype) + row.to(tl.int64) * D
    if D * like_ptr.dtype.element_ty.primitive_bitwidth % 128 == 0:
        base = tl.multiple_of(base, 16)
    return base


@triton.jit
def put_rows_kernel(
    x_ptr,
    values_ptr,
    destination_ptr,
    counts_ptr,
    table_ptr,
    values_at,
    origins_at,
    num_tokens,
    capacity,
    E: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    VALUES: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Tokens in turn; VALUES: the weights and the origins of the rows too."""
    rank = tl.load(counts_ptr + E)
    for t in range(tl.program_id(0), num_tokens, PROGRAMS):
        if VALUES:
            for j in tl.static_range(K):
                slot = t * K + j
                there = tl.load(destination_ptr + slot)
                if there >= 0:
                    base = tl.load(table_ptr + there // capacity)
                    row = there % capacity
                    tl.store((base + values_at).to(values_ptr.dtype) + row, tl.load(values_ptr + slot))
                    tl.store((base + origins_at).to(destination_ptr.dtype) + row, rank * (num_tokens * K) + slot)
        for d in range(0, D, BLOCK_N):
            c = d + tl.arange(0, BLOCK_N)
            value = tl.load(x_ptr + tl.cast(t, tl.int64) * D + c, mask=c < D)
            for j in tl.static_range(K):
                there = tl.load(destination_ptr + t * K + j)
                if there >= 0:
                    out = peer_row(table_ptr, there // capacity, there % capacity, x_ptr, D)
                    tl.store(out + c, value, mask=c < D)


@triton.jit
def take_rows_kernel(
    rows_ptr,
    values_ptr,
    origins_ptr,
    offsets_ptr,
    out_ptr,
    values_out_ptr,
    origins_out_ptr,
    L: tl.constexpr,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    VALUES: tl.constexpr,
):
    """One row per program."""
    n = tl.program_id(0)
    exists = n < tl.load(offsets_ptr + L - 1)
    for d in range(0, D, BLOCK_N):
        c = d + tl.arange(0, BLOCK_N)
        value = tl.load(rows_ptr + n.to(tl.int64) * D + c, mask=(c < D) & exists, other=0.0)
        tl.store(out_ptr + n.to(tl.int64) * D + c, value, mask=c < D)
    if VALUES:
        tl.store(values_out_ptr + n, tl.load(values_ptr + n, mask=exists, other=0.0))
        tl.store(origins_out_ptr + n, tl.load(origins_ptr + n, mask=exists, other=0))


@triton.jit
def send_back_kernel(
    y_ptr,
    values_ptr,
    origin_ptr,
    offsets_ptr,
    table_ptr,
    values_at,
    num_slots,
    L: tl.constexpr,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    VALUES: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Rows that exist, in turn; VALUES: one number of each row too."""
    end = tl.load(offsets_ptr + L - 1)
    for n in range(tl.program_id(0), end, PROGRAMS):
        origin = tl.load(origin_ptr + n)
        source, slot = origin // num_slots, origin % num_slots
        if VALUES:
            base = tl.load(table_ptr + source) + values_at
            tl.store(base.to(values_ptr.dtype) + slot, tl.load(values_ptr + n))
        out = peer_row(table_ptr, source, slot, y_ptr, D)
        for d in range(0, D, BLOCK_N):
            c = d + tl.arange(0, BLOCK_N)
            tl.store(out + c, tl.load(y_ptr + tl.cast(n, tl.int64) * D + c, mask=c < D), mask=c < D)


@triton.jit
def sum_slots_kernel(
    slots_ptr,
    values_ptr,
    destination_ptr,
    out_ptr,
    values_out_ptr,
    K: tl.constexpr,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    VALUES: tl.constexpr,
):
    """One token and BLOCK_N columns per program."""
    num_n: tl.constexpr = (D + BLOCK_N - 1) // BLOCK_N
    t = tl.program_id(0) // num_n
    c = tl.program_id(0) % num_n * BLOCK_N + tl.arange(0, BLOCK_N)
    WIDE: tl.constexpr = tl.float64 if slots_ptr.dtype.element_ty == tl.float64 else tl.float32
    acc = tl.zeros((BLOCK_N,), WIDE)
    for j in tl.static_range(K):
        slot = t * K + j
        exists = tl.load(destination_ptr + slot) >= 0
        acc += tl.load(slots_ptr + slot.to(tl.int64) * D + c, mask=(c < D) & exists, other=0.0).to(WIDE)
        if VALUES and tl.program_id(0) % num_n == 0:
            tl.store(values_out_ptr + slot, tl.load(values_ptr + slot, mask=exists, other=0.0))
    tl.store(out_ptr + t.to(tl.int64) * D + c, acc.to(out_ptr.dtype.element_ty), mask=c < D)


def _tiling(rows: Tensor, values: Tensor | None) -> dict[str, int | bool]:
    width, most = rows.shape[1], 2 * _WIDTH if rows.dtype == torch.uint8 else _WIDTH
    return {"D": width, "BLOCK_N": min(most, triton.next_power_of_2(width)), "VALUES": values is not None}


def _programs(device: torch.device) -> int:
    return _PER_PROCESSOR * persistent_programs(device)


def put_rows_launch(
    x: Tensor, values: Tensor | None, destination: Tensor, counts: Tensor, table: Tensor, at: tuple[int, int], rows: int
) -> Launch:
    """The launch that writes x [T, D], and values [R] with their origins, into buffers of `rows` rows each; `at` is
    where values and origins begin in a buffer, in bytes."""
    tokens = x.shape[0]
    programs = _programs(x.device)
    arguments = {
        "x_ptr": x,
        "values_ptr": destination if values is None else values,  # not read
        "destination_ptr": destination,
        "counts_ptr": counts,
        "table_ptr": table,
        "values_at": at[0],
        "origins_at": at[1],
        "num_tokens": tokens,
        "capacity": rows,
    }
    constants = {"E": counts.shape[1] - 1, "K": destination.shape[0] // tokens, "PROGRAMS": programs}
    return Launch(put_rows_kernel, (programs,), arguments, {**constants, **_tiling(x, values)}, _CONFIG)


def take_rows_launch(
    rows: Tensor,
    offsets: Tensor,
    out: Tensor,
    values: tuple[Tensor, Tensor, Tensor, Tensor] | None,
) -> Launch:
    """The launch that copies rows [N, D] to `out`; `values` are (values, origins, their copies), each [N]."""
    found = (rows, rows, out, out) if values is None else values  # not read
    arguments = {
        "rows_ptr": rows,
        "values_ptr": found[0],
        "origins_ptr": found[1],
        "offsets_ptr": offsets,
        "out_ptr": out,
        "values_out_ptr": found[2],
        "origins_out_ptr": found[3],
    }
    constants = {"L": offsets.shape[0], **_tiling(rows, None if values is None else found[0])}
    return Launch(take_rows_kernel, (rows.shape[0],), arguments, constants, _CONFIG)


def send_back_launch(
    y: Tensor, values: Tensor | None, origin: Tensor, offsets: Tensor, table: Tensor, values_at: int, slots: int
) -> Launch:
    """The launch that writes y [N, D], and values [N], into buffers of `slots` slots each."""
    programs = _programs(y.device)
    arguments = {
        "y_ptr": y,
        "values_ptr": origin if values is None else values,  # not read
        "origin_ptr": origin,
        "offsets_ptr": offsets,
        "table_ptr": table,
        "values_at": values_at,
        "num_slots": slots,
    }
    constants = {"L": offsets.shape[0], "PROGRAMS": programs, **_tiling(y, values)}
    return Launch(send_back_kernel, (programs,), arguments, constants, _CONFIG)


def sum_slots_launch(slots: Tensor, destination: Tensor, out: Tensor, values: tuple[Tensor, Tensor] | None) -> Launch:
    """The launch that writes `out` [T, D] from slots [R, D]; `values` are one number of each slot and their copy."""
    tokens, width = out.shape
    found = (slots, out) if values is None else values  # not read
    tiling = _tiling(slots, None if values is None else found[0])
    arguments = {
        "slots_ptr": slots,
        "values_ptr": found[0],
        "destination_ptr": destination,
        "out_ptr": out,
        "values_out_ptr": found[1],
    }
    constants = {"K": destination.shape[0] // tokens, **tiling}
    grid = (tokens * triton.cdiv(width, int(tiling["BLOCK_N"])),)
    return Launch(sum_slots_kernel, grid, arguments, constants, _CONFIG)
