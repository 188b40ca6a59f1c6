"""Weight gradient of rows that arrived in MXFP8: dW[e] = Gᵀ · X over the rows of expert e, dequantised as they load.

One of G [R, N] and X [R, K], or both, is a payload (`moegraph.ops.mx_payload`): uint8 [R, W], the E4M3 elements of a
row and behind them an E8M0 scale per 32. Elements become bf16 in registers, the very bits of `mx_decode`, and the
matrix unit takes them from there as the left operand of the product: where X is the payload, that is Xᵀ · G, turned
when stored.

    bytes of a payload, in shared memory     [rows, columns]
    as int16, a pair of columns each         [pairs, rows], turned on the way into registers, as bytes could not be
    even and odd columns, bf16               in the very registers of the left operand, in runs of RUN even columns
                                             and RUN odd ones: no byte changes its thread

Ragged descriptors give zeros past an expert's rows, so neither a neighbour's rows nor what lies past the last offset
enters, NaN included; elements and scales of zero bytes are zeros. An expert without rows gets zeros. With `accumulate`
the product is added to what dW holds. Tiles, their order and their stores are those of `wgrad`.

D, the width of a payload's rows, is a multiple of 512, so that rows of W = D + D/32 bytes start at multiples of 16.

Legend: R rows, E experts, N and K the sizes of a weight.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.ragged_tma import create_ragged_descriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from moegraph.kernels.chips import card_of
from moegraph.kernels.config import Config, payload_wgrad_config
from moegraph.kernels.e4m3 import on_hardware
from moegraph.kernels.launch import Launch, load_rows, persistent_programs, tile_constants, tile_of
from moegraph.kernels.mx_payload import from_e4m3
from moegraph.kernels.wgrad import how_to_put, put_tile

WIDTH = 512  # elements: what a payload's rows are whole multiples of
_SCALES = tl.constexpr(16)  # in a load: a descriptor's rows have 16 bytes at least


@triton.jit
def _decoded_scale(byte, HARDWARE: tl.constexpr):
    """2^(byte - 127) as bits of bf16, int16: the exponent, and bit 6 too for 0, which is subnormal, and 255, NaN."""
    if HARDWARE:  # two at a time: bit 8 of 256 - ((byte + 1) & 254) is set for those two
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 special, exponent;
            add.u32 special, $1, 0x00010001;
            and.b32 special, special, 0x00FE00FE;
            sub.u32 special, 0x01000100, special;
            shr.u32 special, special, 2;
            and.b32 special, special, 0x00400040;
            shl.b32 exponent, $1, 7;
            or.b32 $0, exponent, special;
            }""",
            "=r,r",
            [byte],
            dtype=tl.int16,
            is_pure=True,
            pack=2,
        )
    return (byte << 7) | tl.where(((byte + 1) & 254) == 0, 0x40, 0).to(tl.int16)


@triton.jit
def _load_scales(desc, first, last, col, ROWS: tl.constexpr, COLS: tl.constexpr, HARDWARE: tl.constexpr):
    """What COLS elements from column `col` on are multiplied by, 2^(byte - 127) in bf16 or NaN: [ROWS, COLS / 32]."""
    WANTED: tl.constexpr = COLS // 32
    # A descriptor of bytes loads from multiples of 16 of them alone: elsewhere it is an illegal instruction on Hopper.
    loaded = load_rows(desc, first, last, col // 512 * 16, ROWS, _SCALES).reshape(ROWS, _SCALES // WANTED, WANTED)
    mine = tl.arange(0, _SCALES // WANTED)[None, :, None] == col % 512 // COLS
    byte = tl.sum(tl.where(mine, loaded.to(tl.int32), 0), 1)
    return _decoded_scale(byte.to(tl.int16), HARDWARE).to(tl.bfloat16, bitcast=True).reshape(ROWS, WANTED)


@triton.jit
def _taken_apart(pairs, scale, HARDWARE: tl.constexpr):
    """int16 pairs of E4M3 and bf16 scales of the same shape → (even, odd) elements times scales, bf16. An element is
    exact in bf16 and a scale a power of two, so there is one rounding, as in `mx_decode`: none above 2^-126."""
    if HARDWARE:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 bytes;
            .reg .b16 l, h, a, b, c, d;
            .reg .f32 p, q, r, s;
            prmt.b32 bytes, $2, 0, 0x3120;
            mov.b32 {l, h}, bytes;
            cvt.rn.f16x2.e4m3x2 bytes, l;
            mov.b32 {a, b}, bytes;
            cvt.rn.f16x2.e4m3x2 bytes, h;
            mov.b32 {c, d}, bytes;
            cvt.f32.f16 p, a;
            cvt.f32.f16 q, b;
            cvt.f32.f16 r, c;
            cvt.f32.f16 s, d;
            cvt.rn.bf16x2.f32 $0, q, p;
            cvt.rn.bf16x2.f32 $1, s, r;
            mul.rn.bf16x2 $0, $0, $3;
            mul.rn.bf16x2 $1, $1, $3;
            }""",
            "=&r,=&r,r,r",
            [pairs, scale],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    even = from_e4m3((pairs & 0xFF).to(tl.uint8), HARDWARE) * scale.to(tl.float32)
    odd = from_e4m3(((pairs >> 8) & 0xFF).to(tl.uint8), HARDWARE) * scale.to(tl.float32)
    return even.to(tl.bfloat16), odd.to(tl.bfloat16)


@triton.jit
def _load_payload(desc, scale_desc, first, last, col, ROWS: tl.constexpr, COLS: tl.constexpr, HARDWARE: tl.constexpr):
    """The even and the odd of COLS columns from column `col` on, bf16 [ROWS, COLS / 2] each."""
    pairs = load_rows(desc, first, last, col // 2, ROWS, COLS // 2)
    scale = _load_scales(scale_desc, first, last, col, ROWS, COLS, HARDWARE)
    wide = scale[:, :, None].broadcast_to(ROWS, COLS // 32, 16).reshape(ROWS, COLS // 2)
    return _taken_apart(pairs, wide, HARDWARE)


@triton.jit
def _held(acc):
    """The accumulator, looked at: so that products end before the registers of their left operand get the next step's.
    Products under way do not keep their operands, and the compiler does not wait for those of another iteration."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [acc], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def payload_wgrad_kernel(
    payload_desc,
    scale_desc,
    other_desc,
    other_scale_desc,
    out_desc,
    offsets_ptr,
    E: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    PARTS: tl.constexpr,
    HOW: tl.constexpr,
    FLATTEN: tl.constexpr,
    TURNED: tl.constexpr,
    BOTH: tl.constexpr,
    RUN: tl.constexpr,
    HOLD: tl.constexpr,
    HARDWARE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Tiles of BLOCK_M × BLOCK_N of dW, expert by expert; BLOCK_K rows per step. TURNED: the payload is X, and a tile
    is summed as BLOCK_N × BLOCK_M. BOTH: the other operand is a payload too."""
    num_m: tl.constexpr = (N + BLOCK_M - 1) // BLOCK_M
    num_n: tl.constexpr = (K + BLOCK_N - 1) // BLOCK_N
    P: tl.constexpr = BLOCK_N if TURNED else BLOCK_M  # columns of the payload
    Q: tl.constexpr = BLOCK_M if TURNED else BLOCK_N  # and of the other operand
    for t in tl.range(tl.program_id(0), E * num_m * num_n, PROGRAMS, flatten=FLATTEN):
        e = t // (num_m * num_n)
        pm, pn = tile_of(t % (num_m * num_n), num_m, num_n, GROUP_M)
        begin = tl.load(offsets_ptr + e - 1, mask=e > 0, other=0)
        end = tl.load(offsets_ptr + e)
        at = pn * BLOCK_N if TURNED else pm * BLOCK_M
        across = pm * BLOCK_M if TURNED else pn * BLOCK_N
        acc = tl.zeros((P, Q), tl.float32)
        steps = tl.maximum(tl.cdiv(end - begin, BLOCK_K), 1)  # of an expert without rows one step reads zeros
        tl.assume(steps > 0)
        for i in range(0, steps):
            r = begin + i * BLOCK_K
            even, odd = _load_payload(payload_desc, scale_desc, r, end, at, BLOCK_K, P, HARDWARE)
            left = tl.join(even, odd).reshape(BLOCK_K, P // (2 * RUN), RUN, 2).permute(1, 3, 2, 0).reshape(P, BLOCK_K)
            if BOTH:
                other = tl.join(
                    *_load_payload(other_desc, other_scale_desc, r, end, across, BLOCK_K, Q, HARDWARE)
                ).reshape(BLOCK_K, Q)
            else:
                other = load_rows(other_desc, r, end, across, BLOCK_K, Q)
            if HARDWARE:
                acc = tl.dot(left, other, acc, input_precision=PRECISION)
            else:  # the interpreter multiplies no bf16
                acc = tl.dot(left.to(tl.float32), other.to(tl.float32), acc)
            if HOLD:
                acc = _held(acc)
        runs = acc.reshape(P // (2 * RUN), 2, RUN, Q)
        tile = runs.permute(3, 0, 2, 1).reshape(Q, P) if TURNED else runs.permute(0, 2, 1, 3).reshape(P, Q)
        put_tile(out_desc, e, pm * BLOCK_M, pn * BLOCK_N, tile, BLOCK_M, BLOCK_N, PARTS, HOW)


def _descriptors(payload: Tensor, width: int, rows: int, columns: int) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Of a payload's elements as pairs, and of its scales."""
    pairs = payload.view(torch.int16)[:, : width // 2]
    scales = payload[:, width:]
    return create_ragged_descriptor(pairs, [rows, columns // 2]), create_ragged_descriptor(scales, [rows, 16])


def payload_wgrad_launch(
    grad: Tensor,
    rows: Tensor,
    offsets: Tensor,
    out: Tensor,
    *,
    accumulate: bool = False,
    config: Config | None = None,
    capability: int | None = None,
) -> Launch:
    """The launch that writes, or adds to, `out` [E, N, K]; `capability` where it is not the device's.

    Raises ValueError for a payload that the kernel does not take, and a tile that it cannot make.
    """
    (experts, n, k), both = out.shape, grad.dtype == rows.dtype == torch.uint8
    turned = grad.dtype != torch.uint8
    card = card_of(out.device)
    chip = capability or (card.capability if card is not None else 90)
    c = config or payload_wgrad_config(n, k, turned, chip)
    payload, width, other, across = (rows, k, grad, n) if turned else (grad, n, rows, k)
    p, q = (c.block_n, c.block_m) if turned else (c.block_m, c.block_n)
    if width % WIDTH or (both and across % WIDTH):
        raise ValueError(f"payload_wgrad: payloads of rows of {n} and {k}, not of multiples of {WIDTH}")
    if not 32 <= p <= WIDTH or (both and not 32 <= q <= WIDTH):
        raise ValueError(f"payload_wgrad: tiles of {c} do not have 32 to {WIDTH} columns of a payload")
    block = 16 * c.num_warps  # rows of the left operand that are spread over the warps
    programs = persistent_programs(payload.device) * (2 if c.num_warps == 4 else 1)
    parts = 4 if out.element_size() > 2 else 1
    other_desc, other_scale_desc = (
        _descriptors(other, across, c.block_k, q) if both else (create_ragged_descriptor(other, [c.block_k, q]), None)
    )
    payload_desc, scale_desc = _descriptors(payload, width, c.block_k, p)
    arguments: dict[str, Any] = {
        "payload_desc": payload_desc,
        "scale_desc": scale_desc,
        "other_desc": other_desc,
        "other_scale_desc": other_scale_desc or scale_desc,
        "out_desc": TensorDescriptor.from_tensor(out, [1, c.block_m, c.block_n // parts]),
        "offsets_ptr": offsets,
    }
    constants = {
        "E": experts,
        "N": n,
        "K": k,
        **tile_constants(c, programs, torch.bfloat16),
        "PARTS": parts,
        "HOW": how_to_put(accumulate),
        "FLATTEN": c.flatten,
        "TURNED": turned,
        "BOTH": both,
        "RUN": block if p >= 2 * block else 8,
        "HOLD": on_hardware() and chip // 10 == 9,
        "HARDWARE": on_hardware(),
    }
    return Launch(payload_wgrad_kernel, (programs,), arguments, constants, c)


def payload_wgrad(grad: Tensor, rows: Tensor, offsets: Tensor, *, config: Config | None = None) -> Tensor:
    """grad [R, N] and rows [R, K], bf16, or payloads of such, at least one → dW [E, N, K] bf16."""
    n, k = (t.shape[1] // 33 * 32 if t.dtype == torch.uint8 else t.shape[1] for t in (grad, rows))
    out = torch.empty(offsets.shape[0], n, k, dtype=torch.bfloat16, device=grad.device)
    if grad.shape[0] == 0:
        return out.zero_()
    payload_wgrad_into(grad, rows, offsets, out, config=config)
    return out


def payload_wgrad_into(
    grad: Tensor, rows: Tensor, offsets: Tensor, out: Tensor, *, accumulate: bool = False, config: Config | None = None
) -> None:
    """Writes the weight gradient to `out` [E, N, K] bf16 or fp32, or adds it there; there are rows. `out` is contiguous
    and starts at a multiple of 16 bytes."""
    if out.numel():
        payload_wgrad_launch(grad, rows, offsets, out, accumulate=accumulate, config=config).run()
