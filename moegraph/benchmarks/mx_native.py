"""MXFP8 on this device against the same operators emulated on a CPU: what has to hold before a native speed counts.

`python -m moegraph.benchmarks.mx_native` prints a JSON document. Where the device has no MX matrix units it compares
its own emulation, and says so. Quantising has to give the same bits; products the same numbers up to the order of
additions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from moegraph import ops
from moegraph.ops.mx_mm import mx_backend

SHAPES = ((512, 256, 512), (2048, 4096, 4096))  # rows, d_model, d_ff
EXPERTS = 4
BOUND = 8e-3  # two roundings to bf16 of sums in another order

_mg = torch.ops.moegraph


def compare_native(device: torch.device, shapes: Sequence[tuple[int, int, int]] = SHAPES) -> list[dict[str, Any]]:
    """For each operator and shape: the backend, whether bits are equal (quantising) or ‖a-b‖/‖b‖ is within BOUND
    (products), and whether that holds."""
    found: list[dict[str, Any]] = []
    for rows, d, f in shapes:
        backend, reason = mx_backend(f, d, device)
        for name, call in _calls(rows, d, f).items():
            here = [t.cpu() for t in call(device)]
            there = call(torch.device("cpu"))
            exact = "quantize" in name
            difference = max(_difference(a, b, exact) for a, b in zip(here, there, strict=True))
            found.append(
                {
                    "operator": name,
                    "shape": [rows, d, f],
                    "backend": backend,
                    "reason": reason,
                    "difference": difference,
                    "ok": difference == 0 if exact else difference <= BOUND,
                }
            )
    return found


def _calls(rows: int, d: int, f: int) -> dict[str, Callable[[torch.device], tuple[Tensor, ...]]]:
    torch.manual_seed(0)
    ends = torch.tensor([0, rows // 3, rows // 3 + 1, rows - 5], dtype=torch.int32)
    x, grad = (torch.randn(rows, d).bfloat16() for _ in range(2))
    up, down = torch.randn(EXPERTS, 2 * f, d).bfloat16() * d**-0.5, torch.randn(EXPERTS, d, f).bfloat16() * f**-0.5
    z, row_weight = torch.randn(rows, 2 * f).bfloat16(), torch.rand(rows)

    turned = down.transpose(1, 2)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(0)).to(torch.int32)
    inverse = torch.argsort(order).to(torch.int32)

    def moved(device: torch.device) -> tuple[Tensor, ...]:
        given = (each.to(device) for each in (x, order, inverse, ends))
        return ops.mx_permute_quantize(*given, top_k=1, swizzled=True)

    def quantised(device: torch.device, rows_: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        offsets = ends.to(device)
        a = _mg.mx_quantize_rows(rows_.to(device), offsets, True)
        return (*a, *_mg.mx_quantize_rows(weight.to(device), None, True), offsets)

    def dgrad(device: torch.device) -> tuple[Tensor, ...]:
        g, gs, w, ws, offsets = quantised(device, grad, turned)
        given = (g, gs, w, ws, z.to(device), row_weight.to(device), offsets, 0.0, 0.0, True)
        return tuple(_mg.mx_dgrad_swiglu(*given))

    def linear_wgrad(device: torch.device) -> tuple[Tensor, ...]:
        operands = [part for each in (grad, x) for part in _mg.mx_quantize_tokens(each[:-5].to(device), True)]
        return (_mg.mx_linear_wgrad(*operands, True),)

    return {
        "mx_quantize_rows": lambda device: ops.mx_quantize_rows(x.to(device), ends.to(device), swizzled=True),
        "mx_quantize_columns": lambda device: ops.mx_quantize_ragged_columns(x.to(device), ends.to(device))[:2],
        "mx_quantize_tokens": lambda device: _mg.mx_quantize_tokens(x[:-5].to(device), True),
        "mx_permute_quantize": moved,
        "mx_grouped_mm": lambda device: (_mg.mx_grouped_mm(*quantised(device, x, turned), None, None, True),),
        "mx_up_swiglu": lambda device: tuple(_mg.mx_up_swiglu(*quantised(device, x, up), None, 0.0, 0.0, True)),
        "mx_dgrad_swiglu": dgrad,
        "mx_linear_wgrad": linear_wgrad,
    }


def _difference(have: Tensor, want: Tensor, exact: bool) -> float:
    if exact:
        return float((have.view(torch.uint8) != want.view(torch.uint8)).float().mean())
    return float((have.double() - want.double()).norm() / want.double().norm().clamp_min(1e-300))


if __name__ == "__main__":
    found = compare_native(torch.device("cuda", torch.cuda.current_device()))
    print(json.dumps({"operators": found, "ok": all(each["ok"] for each in found)}))
    raise SystemExit(0 if all(each["ok"] for each in found) else 1)
