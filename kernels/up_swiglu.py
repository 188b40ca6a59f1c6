"""The up projection of the experts with the gather in its loads and the activation in its epilogue (F1).

    z[r] = x[order[r] // K] · W[e(r)]ᵀ (+ bias)   z [R, 2F] = [gate | up], the pre-activation that backward needs
    a[r] = silu(gate) · up                   a [R, F]; or the clamped SwiGLU (activation.py)

One tensor-map load brings the gate rows and the up rows of a tile side by side (the weight seen as [E, 2, F, D]), so
both halves of an output are in one accumulator and the split costs nothing. `a` is computed from z as stored.
Rows past the last offset are written as zeros. With `separate` in its configuration the gather is a kernel of its own.

Legend: T tokens, D model width, F expert width, E experts, R rows.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.ragged_tma import create_ragged_descriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from moegraph.kernels.activation import Activation, gated
from moegraph.kernels.config import Config
from moegraph.kernels.launch import (
    Launch,
    load_rows,
    persistent_programs,
    schedule_arguments,
    store_half,
    store_rows,
    tile_constants,
    tile_of,
)
from moegraph.kernels.move_rows import permute
from moegraph.kernels.tiles import Schedule, tile_schedule
from moegraph.kernels.tuning import choose_config
from moegraph.kernels.zero_tail import zero_tail


@triton.jit
def up_swiglu_kernel(
    x_ptr,
    rows_desc,
    order_ptr,
    weight_desc,
    bias_ptr,
    z_desc,
    act_desc,
    expert_ptr,
    first_ptr,
    last_ptr,
    count_ptr,
    F: tl.constexpr,
    D: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    GATHER: tl.constexpr,
    TOP_K: tl.constexpr,
    BIAS: tl.constexpr,
    CLAMPED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    FLATTEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """BLOCK_N counts gate and up columns together."""
    HALF: tl.constexpr = BLOCK_N // 2
    num_n: tl.constexpr = (F + HALF - 1) // HALF
    num_m = tl.load(count_ptr)
    for t in tl.range(tl.program_id(0), num_m * num_n, PROGRAMS, flatten=FLATTEN):
        pm, pn = tile_of(t, num_m, num_n, GROUP_M)
        e = tl.load(expert_ptr + pm)
        first = tl.load(first_ptr + pm)
        last = tl.load(last_ptr + pm)
        r = first + tl.arange(0, BLOCK_M)
        exists = r < last
        cols = tl.arange(0, BLOCK_K)
        if GATHER:
            token = (tl.load(order_ptr + r, mask=exists, other=0) // TOP_K).to(tl.int64)
            x = x_ptr + token[:, None] * D + cols[None, :]
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, D, BLOCK_K):
            if not GATHER:
                a = load_rows(rows_desc, first, last, k, BLOCK_M, BLOCK_K)
            elif D % BLOCK_K == 0:
                a = tl.load(x + k, mask=exists[:, None], other=0.0)
            else:
                a = tl.load(x + k, mask=exists[:, None] & (k + cols < D)[None, :], other=0.0)
            b = weight_desc.load([e, 0, pn * HALF, k]).reshape(BLOCK_N, BLOCK_K).T
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
        gate, up = tl.split(acc.reshape(BLOCK_M, 2, HALF).permute(0, 2, 1))
        if BIAS:
            c = pn * HALF + tl.arange(0, HALF)
            real = c < F
            to = bias_ptr + e * 2 * F + c
            # Rounded before the bias too: z is then the one that `grouped_mm` and `add_expert_bias` make in backward.
            gate = gate.to(z_desc.dtype).to(tl.float32) + tl.load(to, mask=real, other=0.0).to(tl.float32)[None, :]
            up = up.to(z_desc.dtype).to(tl.float32) + tl.load(to + F, mask=real, other=0.0).to(tl.float32)[None, :]
        gate = gate.to(z_desc.dtype)
        up = up.to(z_desc.dtype)
        store_half(z_desc, first, last, 0, pn * HALF, gate, BLOCK_M, HALF)
        act = gated(gate.to(tl.float32), up.to(tl.float32), CLAMPED, ALPHA, LIMIT)
        store_rows(act_desc, first, last, pn * HALF, act.to(act_desc.dtype), BLOCK_M, HALF)
        store_half(z_desc, first, last, 1, pn * HALF, up, BLOCK_M, HALF)


def up_swiglu_launch(
    x: Tensor,
    order: Tensor,
    weight: Tensor,
    offsets: Tensor,
    z: Tensor,
    act: Tensor,
    *,
    top_k: int,
    bias: Tensor | None = None,
    activation: Activation = Activation(),
    config: Config | None = None,
    schedule: Schedule | None = None,
) -> Launch:
    """The launch that writes `z` [R, 2F] and `act` [R, F]. With `separate`, x are the rows [R, D] themselves."""
    num_experts, two_f, d = weight.shape
    f = two_f // 2
    c = config or choose_config("up_swiglu", x.dtype, f, d, order.shape[0], num_experts, x.device).config
    schedule = schedule or tile_schedule(offsets, order.shape[0], c.block_m)
    half = c.block_n // 2
    programs = persistent_programs(x.device)
    halves = TensorDescriptor(weight, [num_experts, 2, f, d], [two_f * d, f * d, d, 1], [1, 2, half, c.block_k])
    arguments = {
        "x_ptr": x,
        "rows_desc": create_ragged_descriptor(x, [c.block_m, c.block_k]),
        "order_ptr": order,
        "weight_desc": halves,
        "bias_ptr": bias if bias is not None else weight,
        "z_desc": create_ragged_descriptor(z.view(-1, 2, f), [c.block_m, 1, half]),
        "act_desc": create_ragged_descriptor(act, [c.block_m, half]),
        **schedule_arguments(schedule),
    }
    constants = {
        "F": f,
        "D": d,
        **tile_constants(c, programs, x.dtype),
        "GATHER": not c.separate,
        "TOP_K": top_k,
        "BIAS": bias is not None,
        **activation.constants(),
        "FLATTEN": c.flatten,
    }
    return Launch(up_swiglu_kernel, (programs,), arguments, constants, c)


def up_swiglu(
    x: Tensor,
    order: Tensor,
    inverse: Tensor,
    weight: Tensor,
    offsets: Tensor,
    *,
    top_k: int,
    bias: Tensor | None = None,
    activation: Activation = Activation(),
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:
    """x [T, D], order and inverse [R] int32, weight [E, 2F, D], bias [E, 2F] → (z [R, 2F], a [R, F])."""
    rows, (num_experts, two_f, d) = order.shape[0], weight.shape
    c = config or choose_config("up_swiglu", x.dtype, two_f // 2, d, rows, num_experts, x.device).config
    z, act = x.new_empty(rows, two_f), x.new_empty(rows, two_f // 2)
    if z.numel():
        source = permute(x, inverse, offsets, top_k) if c.separate else x
        up_swiglu_launch(
            source, order, weight, offsets, z, act, top_k=top_k, bias=bias, activation=activation, config=c
        ).run()
        zero_tail(offsets, z, act)
    return z, act
