"""Every kernel's launch at a shape, on meta tensors: what is compiled and inspected without a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from moegraph.kernels.activation import Activation
from moegraph.kernels.bias_grad import bias_grad_launch, num_parts
from moegraph.kernels.chips import Card
from moegraph.kernels.cross_entropy import cross_entropy_backward_launch, cross_entropy_launch
from moegraph.kernels.direct_plan import base_launch, destination_launch
from moegraph.kernels.direct_rows import put_rows_launch, send_back_launch, sum_slots_launch, take_rows_launch
from moegraph.kernels.embedding_grad import embedding_grad_launch
from moegraph.kernels.fp8_quantize import fp8_columns_launch, fp8_rows_launch
from moegraph.kernels.gated_backward import gated_backward_launch
from moegraph.kernels.gated_forward import gated_forward_launch
from moegraph.kernels.gated_gradient import gated_gradient_launch
from moegraph.kernels.launch import Launch
from moegraph.kernels.move_rows import combine_launch, move_weights_launch, permute_launch
from moegraph.kernels.mx_dequantize import mx_dequantize_launch
from moegraph.kernels.mx_payload import mx_decode_launch, mx_encode_launch, mx_split_launch, payload_bytes
from moegraph.kernels.mx_quantize import empty_quantized, mx_quantize_launch
from moegraph.kernels.padded_offsets import padded_offsets_launch
from moegraph.kernels.permute_quantize import (
    blocks_permute_quantize_launch,
    fp8_permute_quantize_launch,
    mx_permute_quantize_launch,
)
from moegraph.kernels.products import product_launch
from moegraph.kernels.quantized_rows import FORMATS, empty_rows
from moegraph.kernels.shapes import block_problems
from moegraph.kernels.signals import ARRIVED, FREE, signal_launch, wait_launch
from moegraph.kernels.sort_rows import count_launch, default_block, place_launch, scan_launch
from moegraph.kernels.tiles import Schedule, max_tiles, tile_schedule_launch
from moegraph.kernels.top_k import top_k_launch
from moegraph.kernels.tuning import choose_for
from moegraph.kernels.zero_tail import zero_tail_launch


def launches(
    *,
    tokens: int,
    d_model: int,
    d_ff: int,
    num_experts: int,
    top_k: int,
    dtype: torch.dtype = torch.bfloat16,
    card: Card | None = None,
) -> Iterator[tuple[str, Launch]]:
    """(name, launch) of each kernel of one mixture-of-experts block, forward and backward, its products with the
    configurations that a card gets (None: those of the rule for sm_90)."""
    rows = tokens * top_k

    def tensor(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=kind, device="meta")

    def index(*shape: int) -> torch.Tensor:
        return tensor(*shape, kind=torch.int32)

    offsets, x, wide, z = index(num_experts), tensor(tokens, d_model), tensor(rows, d_model), tensor(rows, 2 * d_ff)
    ids, block = index(tokens, top_k), default_block(num_experts)
    ends = index(num_experts + 1, -(-rows // block.block_m))
    yield "top_k", top_k_launch(tensor(tokens, num_experts, kind=torch.float32), ids)
    yield "sort_count", count_launch(ids, offsets, ends, block)
    yield "sort_scan", scan_launch(ends)
    yield "sort_place", place_launch(ids, ends, index(rows), index(rows), offsets, block)
    limit = max_tiles(rows, num_experts, 128)
    yield (
        "tile_schedule",
        tile_schedule_launch(offsets, rows, 128, Schedule(index(limit), index(limit), index(limit), index(1))),
    )
    yield "zero_tail", zero_tail_launch(z, offsets)
    yield "permute", permute_launch(x, index(rows), offsets, wide, top_k)
    yield "combine", combine_launch(wide, index(rows), offsets, x, top_k)
    sums = tensor(num_parts(rows, num_experts), num_experts, 2 * d_ff, kind=torch.float32)
    yield "up_bias_grad", bias_grad_launch(z, offsets, sums)
    act, weight = tensor(rows, d_ff), tensor(rows, kind=torch.float32)
    yield "router_weights", move_weights_launch(weight, index(rows), offsets, weight)
    yield "gated_backward", gated_backward_launch(act, z, weight, offsets, z, act, weight)
    sizes = {"tokens": tokens, "d_model": d_model, "d_ff": d_ff, "num_experts": num_experts, "top_k": top_k}
    for name, problem in block_problems(**sizes, dtype=dtype).items():
        choice = choose_for(problem, card or torch.device("meta"))
        yield name, product_launch(problem, choice.config, row_weight=name == "down")
        if problem.kernel == "wgrad":
            yield f"{name}_add", product_launch(problem, choice.config, accumulate=True)


def exchange_launches(
    *, tokens: int, d_model: int, num_experts: int, top_k: int, ranks: int, dtype: torch.dtype = torch.bfloat16
) -> Iterator[tuple[str, Launch]]:
    """(name, launch) of what transport `direct` runs, on meta tensors; a buffer has room for 1.25 balanced loads."""
    slots, room, local = tokens * top_k, tokens * top_k * 5 // 4, num_experts // ranks

    def tensor(*shape: int, kind: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=kind, device="meta")

    counts, table, epoch = tensor(ranks, num_experts + 1), tensor(ranks, kind=torch.int64), tensor(1)
    base, destination, offsets, flags = tensor(num_experts), tensor(slots), tensor(local), tensor(2, ranks)
    x, rows, back = (tensor(each, d_model, kind=dtype) for each in (tokens, room, slots))
    row_weight, weights = tensor(room, kind=torch.float32), tensor(slots, kind=torch.float32)
    size = room * d_model * dtype.itemsize
    at = (size, size + 4 * room)
    yield "direct_base", base_launch(counts, base, offsets, tensor(kind=torch.int64), room)
    yield "direct_destination", destination_launch(destination, base, base, destination, ranks, room)
    yield "put_rows", put_rows_launch(x, weights, destination, counts, table, at, room)
    yield "put_rows_only", put_rows_launch(x, None, destination, counts, table, at, room)
    found = (row_weight, destination, row_weight, destination)
    yield "take_rows", take_rows_launch(rows, offsets, rows, found)
    yield "take_rows_only", take_rows_launch(rows, offsets, rows, None)
    yield "send_back", send_back_launch(rows, row_weight, destination, offsets, table, size, slots)
    yield "send_back_only", send_back_launch(rows, None, destination, offsets, table, size, slots)
    yield "sum_slots", sum_slots_launch(back, destination, x, (weights, weights))
    yield "sum_slots_only", sum_slots_launch(back, destination, x, None)
    yield "say_arrived", signal_launch(table, epoch, ARRIVED, ranks - 1)
    yield "say_free", signal_launch(table, epoch, FREE, ranks - 1)
    yield "wait_for_rows", wait_launch(flags, epoch, ARRIVED)
    yield "wait_until_free", wait_launch(flags, epoch, FREE)


def cross_entropy_launches(
    *, tokens: int, vocab_size: int, dtype: torch.dtype = torch.bfloat16
) -> Iterator[tuple[str, Launch]]:
    """(name, launch) of the loss of each token and its gradient, on meta tensors."""
    logits = torch.empty(tokens, vocab_size, dtype=dtype, device="meta")
    labels = torch.empty(tokens, dtype=torch.int64, device="meta")
    loss = torch.empty(tokens, dtype=torch.float32, device="meta")
    yield "cross_entropy", cross_entropy_launch(logits, labels, loss, loss)
    yield "cross_entropy_backward", cross_entropy_backward_launch(loss, None, logits, labels, loss, logits)


def embedding_grad_launches(*, tokens: int, vocab_size: int, d_model: int) -> Iterator[tuple[str, Launch]]:
    """(name, launch) of the gradient of an embedding from bf16, on meta tensors."""
    ids = torch.empty(tokens, dtype=torch.int64, device="meta")
    grad = torch.empty(tokens, d_model, dtype=torch.bfloat16, device="meta")
    into = torch.empty(vocab_size, d_model, dtype=torch.float32, device="meta")
    yield "embedding_grad", embedding_grad_launch(grad, ids, ids, into)


def payload_launches(
    *, tokens: int, d_model: int, num_experts: int, top_k: int, ranks: int, dtype: torch.dtype = torch.bfloat16
) -> Iterator[tuple[str, Launch]]:
    """(name, launch) of what rows that travel in MXFP8 take beyond `exchange_launches`, on meta tensors."""
    slots, room, local = tokens * top_k, tokens * top_k * 5 // 4, num_experts // ranks

    def tensor(*shape: int, kind: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=kind, device="meta")

    def payload(rows: int) -> torch.Tensor:
        return tensor(rows, payload_bytes(d_model), kind=torch.uint8)

    counts, table = tensor(ranks, num_experts + 1), tensor(ranks, kind=torch.int64)
    destination, offsets = tensor(slots), tensor(local)
    limit = max_tiles(room, local, 128)
    schedule = Schedule(tensor(limit), tensor(limit), tensor(limit), tensor(1))
    data = tensor(room, d_model, kind=torch.float8_e4m3fn)
    scale = tensor((-(-room // 128) + local) * 128, -(-d_model // 128) * 4, kind=torch.uint8)
    weights, row_weight = tensor(slots, kind=torch.float32), tensor(room, kind=torch.float32)
    size = payload(room).numel()
    at = (size, size + 4 * room)
    yield "mx_encode", mx_encode_launch(tensor(tokens, d_model, kind=dtype), payload(tokens))
    yield "mx_decode", mx_decode_launch(payload(room), tensor(room, d_model, kind=torch.bfloat16))
    yield "mx_split", mx_split_launch(payload(room), offsets, schedule, data, scale)
    yield "permute", permute_launch(payload(tokens), destination, tensor(num_experts), payload(slots), top_k)
    yield "put_rows", put_rows_launch(payload(tokens), weights, destination, counts, table, at, room)
    yield "put_rows_only", put_rows_launch(payload(tokens), None, destination, counts, table, at, room)
    found = (row_weight, destination, row_weight, destination)
    yield "take_rows", take_rows_launch(payload(room), offsets, payload(room), found)
    yield "take_rows_only", take_rows_launch(payload(room), offsets, payload(room), None)


def quantize_launches(
    *, rows: int, columns: int, num_experts: int, dtype: torch.dtype = torch.bfloat16
) -> Iterator[tuple[str, Launch]]:
    """(name, launch) of what quantises ragged rows [R, K], tokens on their way to them, and weights [E, K, K], on
    meta tensors."""

    def tensor(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=kind, device="meta")

    def index(*shape: int) -> torch.Tensor:
        return tensor(*shape, kind=torch.int32)

    x, weight = tensor(rows, columns), tensor(num_experts, columns, columns)
    offsets, limit = index(num_experts), max_tiles(rows, num_experts, 128)
    schedule = Schedule(index(limit), index(limit), index(limit), index(1))
    for name, axes in {"rows": (True, False), "columns": (False, True), "both": (True, True)}.items():
        for swizzled in (False, True):
            suffix = f"{name}{'_swizzled' * swizzled}"
            asked = {"rows": axes[0], "columns": axes[1], "swizzled": swizzled}
            out = empty_quantized(x, num_experts, **asked)
            yield f"mx_{suffix}", mx_quantize_launch(x, out, offsets, schedule, swizzled=swizzled)
            out = empty_quantized(weight, 0, **asked)
            yield f"mx_weight_{suffix}", mx_quantize_launch(weight, out, None, None, swizzled=swizzled)
    plain = empty_quantized(x, 0, rows=True, columns=False, swizzled=False)
    assert plain.row_data is not None
    assert plain.row_scale is not None
    yield (
        "dequantize",
        mx_dequantize_launch(plain.row_data, plain.row_scale, tensor(rows, columns, kind=torch.bfloat16)),
    )
    data, scale = tensor(rows, columns, kind=torch.float8_e4m3fn), tensor(rows, kind=torch.float32)
    yield "fp8_rows", fp8_rows_launch(x, offsets, data, scale)
    top_k = 8 if rows % 8 == 0 else 1
    moved = (tensor(rows // top_k, columns), index(rows), offsets, data)
    yield "fp8_permute", fp8_permute_quantize_launch(*moved, scale, top_k)
    if columns % 128 == 0:
        of_blocks = tensor(columns // 128, rows, kind=torch.float32)
        yield "fp8_permute_blocks", blocks_permute_quantize_launch(*moved, of_blocks, top_k)
    row_scale = empty_quantized(x, num_experts, rows=True, columns=False, swizzled=True).row_scale
    assert row_scale is not None
    yield "mx_permute_swizzled", mx_permute_quantize_launch(*moved, row_scale, top_k, swizzled=True)
    padded = (-(-rows // 128) + num_experts) * 128
    data, scale = tensor(columns, padded, kind=torch.float8_e4m3fn), tensor(num_experts, columns, kind=torch.float32)
    amax = index(num_experts, columns)
    for name, find_amax in (("fp8_columns_amax", True), ("fp8_columns", False)):
        yield name, fp8_columns_launch(x, offsets, schedule, amax, scale, data, find_amax=find_amax)
    yield "padded_offsets", padded_offsets_launch(offsets, index(num_experts))


def activation_launches(
    *, rows: int, d_ff: int, num_experts: int, clamped: bool = False
) -> Iterator[tuple[str, Launch]]:
    """(name, launch) of what computes an activation of bf16 and its gradient and quantises them, in every format whose
    blocks fit, on meta tensors; for MXFP8 without offsets as well, as of a linear layer."""
    activation = Activation(True, 1.702, 7.0) if clamped else Activation()

    def tensor(*shape: int, kind: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=kind, device="meta")

    z, act, ends = tensor(rows, 2 * d_ff), tensor(rows, d_ff), tensor(num_experts, kind=torch.int32)
    for name in FORMATS:
        if name == "blocks" and d_ff % 128:
            continue
        for offsets, suffix in ((ends, ""), *(((None, "_dense"),) if name == "mx" else ())):
            experts = 0 if offsets is None else num_experts
            narrow, wide = (empty_rows(z, rows, width, experts, name) for width in (d_ff, 2 * d_ff))
            for kept in (None, act):
                launch = gated_forward_launch(z, offsets, kept, narrow, name, activation=activation)
                yield f"{name}_activation{'_kept' * (kept is not None)}{suffix}", launch
            launch = gated_gradient_launch(act, z, offsets, z, wide, name, activation=activation)
            yield f"{name}_gradient{suffix}", launch
    if d_ff % 128 == 0:
        weight, wide = tensor(rows, kind=torch.float32), empty_rows(z, rows, 2 * d_ff, num_experts, "blocks")
        given = (act, z, weight, ends, z, act, weight, wide)
        yield "blocks_weighted_gradient", gated_backward_launch(*given, name="blocks", activation=activation)
