"""Scaled 8-bit operands for tests: small quantisers, and products of what they made in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.kernels.cases import Ragged

FP8 = torch.float8_e4m3fn


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., K] → FP8 data and fp32 scales [...], one per row."""
    scale = x.abs().amax(-1).float().clamp_min(1e-12) / 448
    return (x / scale[..., None]).clamp(-448, 448).to(FP8), scale


def restored(data: Tensor, scale: Tensor) -> Tensor:
    """What `quantised` made, in float64."""
    return data.float().double() * scale.double()[..., None]


def mx_quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., K] → FP8 data and uint8 exponents [..., K/32], rounded up."""
    blocks = x.float().unflatten(-1, (-1, 32))
    exponent = torch.ceil(torch.log2(blocks.abs().amax(-1).clamp_min(1e-30) / 448)).clamp(-127, 127)
    data = (blocks / torch.exp2(exponent)[..., None]).clamp(-448, 448)
    return data.flatten(-2).to(FP8), (exponent + 127).to(torch.uint8)


def mx_restored(data: Tensor, scale: Tensor) -> Tensor:
    """What `mx_quantised` made, in float64."""
    return data.float().double() * torch.exp2(scale.double() - 127).repeat_interleave(32, -1)


def poisoned(data: Tensor, real: int) -> Tensor:
    """Rows from `real` on hold NaN: they must not be felt."""
    out = data.clone()
    if out.dtype == torch.uint8:
        out[real:] = 255
    elif out.dtype == FP8:
        out.view(torch.uint8)[real:] = 0x7F
    else:
        out[real:] = float("nan")
    return out


def grouped64(rows: Tensor, weight: Tensor, case: Ragged) -> Tensor:
    """Every row of float64 `rows` times the matrix of its expert, zero for rows that do not exist."""
    out = rows.new_zeros(case.rows, weight.shape[1])
    start = 0
    for e, size in enumerate(case.sizes):
        out[start : start + size] = rows[start : start + size] @ weight[e].t()
        start += size
    return out


def transposed_runs(x: Tensor, case: Ragged, align: int) -> tuple[Tensor, Tensor, Tensor]:
    """x [R, C] → [C, P] FP8, every expert's run padded with zeros to a multiple of `align`, its scales [E, C] and the
    ends of the padded runs. Behind the last one lies NaN; so are the scales of experts without rows."""
    runs, scales, ends, start = [], [], [], 0
    for size in case.sizes:
        data, scale = quantised(x[start : start + size].t()) if size else (x.new_empty(x.shape[1], 0).to(FP8), None)
        runs.append(torch.nn.functional.pad(data.view(torch.uint8), (0, -size % align)))
        scales.append(torch.full((x.shape[1],), float("nan"), device=x.device) if scale is None else scale)
        ends.append(sum(run.shape[1] for run in runs))
        start += size
    past = runs[0].new_full((x.shape[1], 16), 0x7F)  # NaN
    data = torch.cat([*runs, past], 1).contiguous().view(FP8)
    return data, torch.stack(scales).float(), torch.tensor(ends, dtype=torch.int32, device=x.device)


def block_quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [R, K] → FP8 data and fp32 scales [K/128, R] of each row's blocks of 128."""
    data, scale = quantised(x.unflatten(1, (-1, 128)))
    return data.flatten(1), scale.t().contiguous()


def block_restored(data: Tensor, scale: Tensor) -> Tensor:
    """What `block_quantised` made, in float64."""
    return data.float().double() * scale.t().double().repeat_interleave(128, 1)


def square_quantised(w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """w [E, N, K] → FP8 data, fp32 scales [E, ⌈N/128⌉, K/128] of blocks of 128 × 128, and the values in float64."""
    _, n, _ = w.shape
    padded = torch.nn.functional.pad(w, (0, 0, 0, -n % 128)).unflatten(2, (-1, 128)).unflatten(1, (-1, 128))
    scale = padded.abs().amax((2, 4)).clamp_min(1e-12) / 448
    data = (padded / scale[:, :, None, :, None]).clamp(-448, 448).to(FP8)
    values = data.float().double() * scale.double()[:, :, None, :, None]
    return data.flatten(3).flatten(1, 2)[:, :n].contiguous(), scale, values.flatten(3).flatten(1, 2)[:, :n]
