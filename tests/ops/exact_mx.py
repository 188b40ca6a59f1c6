"""MXFP8 one block at a time in exact rational arithmetic: slow, and nothing shared with `moegraph.ops.mx_format`.

A float is its 32 bits; values are fractions, so no step rounds but the last, which looks the nearest element up.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from fractions import Fraction

import torch
from torch import Tensor

NAN, INF = "nan", "inf"
Value = Fraction | str


def magnitude(bits: int) -> Value:
    """|x| of fp32 bits."""
    exponent, mantissa = (bits >> 23) & 0xFF, bits & 0x7FFFFF
    if exponent == 0xFF:
        return NAN if mantissa else INF
    if exponent == 0:
        return Fraction(mantissa, 2**149)
    return Fraction(2**23 + mantissa) * Fraction(2) ** (exponent - 150)


def element(code: int) -> Fraction:
    """The value of E4M3 code 0 … 126: 4 bits of exponent with bias 7, 3 of mantissa."""
    exponent, mantissa = code >> 3, code & 7
    if exponent == 0:
        return Fraction(mantissa, 8) * Fraction(1, 2**6)
    return Fraction(8 + mantissa, 8) * Fraction(2) ** (exponent - 7)


ELEMENTS = [element(code) for code in range(127)]


def nearest(value: Fraction) -> int:
    """The E4M3 code nearest to a magnitude; of two equally near the even one; 126 (448) for all that is larger."""
    above = bisect_left(ELEMENTS, value)
    if above == 127:
        return 126
    if above == 0:
        return 0
    up, down = ELEMENTS[above] - value, value - ELEMENTS[above - 1]
    if up == down:
        return above if above % 2 == 0 else above - 1
    return above if up < down else above - 1


def exponent_of(amax: Fraction, rounding: str) -> int:
    """The smallest e ≥ -127 with amax ≤ 448 · 2^e (rceil), or with amax < 2^(e + 9) (floor)."""
    e = -127
    while amax > 448 * Fraction(2) ** e if rounding == "rceil" else amax >= Fraction(2) ** (e + 9):
        e += 1
    return e


def quantize_block(bits: list[int], rounding: str) -> tuple[list[int], int]:
    """fp32 bits of the elements of one block → (E4M3 codes, E8M0 byte)."""
    values = [magnitude(b) for b in bits]
    signs = [(b >> 31) << 7 for b in bits]
    if NAN in values:
        if rounding == "rceil":
            return [0x7F] * len(bits), 255
        return [0x7F if v in (NAN, INF) else sign for v, sign in zip(values, signs, strict=True)], 255
    if INF in values:
        e = 127 if rounding == "rceil" else 120
    else:
        e = exponent_of(max(values), rounding)  # type: ignore[type-var]
    scale = Fraction(2) ** e
    if e == -127:  # flushed by rceil; floor divides by the smallest normal number
        scale = Fraction(1) if rounding == "rceil" else Fraction(2) ** -126
    codes = [126 if v == INF else nearest(v / scale) for v in values]  # type: ignore[operator]
    return [sign | code for sign, code in zip(signs, codes, strict=True)], e + 127


def quantize_rows(x: Tensor, rounding: str) -> tuple[Tensor, Tensor]:
    """x [B, 32] fp32 or bf16 → (codes [B, 32], bytes [B]), uint8."""
    rows = (x.float().view(torch.int32).long() & 0xFFFFFFFF).tolist()
    found = [quantize_block(row, rounding) for row in rows]
    return (
        torch.tensor([codes for codes, _ in found], dtype=torch.uint8),
        torch.tensor([byte for _, byte in found], dtype=torch.uint8),
    )


def adversarial(seed: int = 0) -> Tensor:
    """Blocks [B, 32] fp32, each with another awkward amax, and ties, subnormals and zeros below it."""
    draw = random.Random(seed)
    amax = {0, 1, 2, 0x00400000, 0x007FFFFF, 0x7F7FFFFF, 0x7F7FFFFE}
    for exponent in [*range(1, 20), *range(100, 140, 3), 200, *range(245, 255)]:
        for mantissa in (0, 1, 2**23 - 1, 0x5FFFFF, 0x600000, 0x600001, 0x610000, 0x400000):
            amax.add(exponent << 23 | mantissa)
    blocks = []
    for top in sorted(amax):
        row = [top]
        while len(row) < 32:
            kind = draw.randrange(5)
            if kind == 0:  # random, below
                low = draw.randrange(top + 1)
            elif kind == 1:  # a few powers of two below, where rounding happens
                low = max(top - (draw.randrange(14) << 23) - draw.randrange(2**23), 0)
            elif kind == 2:  # ties between neighbours and one ulp around them: 5 leading bits of mantissa
                low = max(((top >> 23) - draw.randrange(18)) << 23, 0) | draw.randrange(32) << 18
                low = max(low + draw.choice((-1, 0, 0, 1)), 0)
            elif kind == 3:
                low = draw.randrange(min(top, 2**23) + 1)
            else:
                low = 0
            row.append(min(low, top) | draw.randrange(2) << 31)
        draw.shuffle(row)
        blocks.append(row)
    some = blocks[:: len(blocks) // 6]
    for special in ([0x7FC00000], [0xFFC00000], [0x7F800001, 0x7F800000], [0x7F800000], [0xFF800000, 0x7F800000]):
        blocks += [[*special, *block[len(special) :]] for block in some]
    signed = torch.tensor(blocks, dtype=torch.int64)
    return signed.where(signed < 2**31, signed - 2**32).to(torch.int32).view(torch.float32)
