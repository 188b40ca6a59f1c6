"""fp32 to E4M3, the 8-bit floating point of MXFP8 and FP8, in a kernel.

A device has an instruction for it. Triton's interpreter rounds E4M3 wrongly (ties away from zero, subnormals down), so
there the bits are computed. Which one is a constant of the launch, `HARDWARE`.
"""

from __future__ import annotations

import triton
import triton.language as tl

E4M3_MAX = tl.constexpr(448.0)
INFINITE = tl.constexpr(0x7F800000)  # bits of fp32 infinity; NaN is above
NAN_BYTE = tl.constexpr(0x7F)


def on_hardware() -> bool:
    """Whether kernels are compiled rather than interpreted."""
    return not triton.knobs.runtime.interpret


@triton.jit
def magnitude_bits(x):
    """|x| of fp32 as int32: ordered as the magnitudes are, with NaN above infinity."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _larger(a, b):
    """The larger of two fp32, NaN if one is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def amax_bits(x, AXIS: tl.constexpr, HARDWARE: tl.constexpr):
    """int32 bits of the largest magnitudes along an axis of fp32 x, NaN above infinity. A chip's maximum takes
    magnitudes for nothing and keeps NaN; the interpreter's does not keep it."""
    if HARDWARE:
        return magnitude_bits(tl.reduce(tl.abs(x), AXIS, _larger))
    return tl.max(magnitude_bits(x), AXIS)


@triton.jit
def to_e4m3(x, HARDWARE: tl.constexpr):
    """fp32, not NaN, → E4M3 as uint8: saturated at ±448, nearest even."""
    if HARDWARE:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    x = tl.clamp(x, -E4M3_MAX, E4M3_MAX)
    bits = magnitude_bits(x)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)  # exponents are biased by 127 and by 7
    subnormal = magnitude_bits(tl.abs(x) + 16384.0) - 0x46800000  # in units of 2^-9, the spacing of fp32 at 2^14
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (tl.where(bits < (121 << 23), subnormal, normal) | sign).to(tl.uint8)


@triton.jit
def quantized(x, factor, HARDWARE: tl.constexpr):
    """x · factor as E4M3, uint8; NaN where the factor is. A chip rounds NaN to 0x7F."""
    if HARDWARE:
        return to_e4m3(x * factor, HARDWARE)
    return tl.where(factor == factor, to_e4m3(x * factor, HARDWARE), NAN_BYTE).to(tl.uint8)
