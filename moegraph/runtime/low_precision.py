"""What a device makes of 8-bit products and 8-bit rows: its matrix units run them, or they are emulated."""

from __future__ import annotations

import torch

from moegraph.specs.schema import Spec


def low_precision_text(spec: Spec, device: torch.device) -> str | None:
    """A sentence for the log: which products run in which format, whether this device has units for it, and whether
    rows travel in 8 bits; None where nothing is cast."""
    parts = [part for part in (_products(spec, device), _dispatch(spec)) if part]
    return f"precision: {'; '.join(parts)}" if parts else None


def _dispatch(spec: Spec) -> str | None:
    dispatch = spec.precision.mxfp8.dispatch
    if dispatch == "off":
        return None
    where = "" if spec.layout.ep > 1 else ", and none does with ep 1"
    return f"rows travel to experts in mxfp8 ({dispatch}){where}"


def _products(spec: Spec, device: torch.device) -> str | None:
    from moegraph.ops.block_mm import block_backend
    from moegraph.ops.mx_mm import mx_backend
    from moegraph.ops.scaled_mm import fp8_backend

    parts, d_model = spec.precision.mxfp8.parts, spec.model.d_model
    if not parts and spec.precision.fp8 == "off":
        return None
    width = _width(spec, next(iter(parts), "experts"))
    fp8 = block_backend if spec.precision.fp8 == "blockwise" else fp8_backend
    backend, reason = (mx_backend if parts else fp8)(width, d_model, device)
    names = [f"{_NAMES[part]} in mxfp8 ({word})" for part, word in parts.items()]
    what = ", ".join(names) or f"experts in fp8 ({spec.precision.fp8})"
    how = "on matrix units of its own" if backend == "triton" else "emulated here: its numbers without its speed"
    return f"{what}, {how}: {reason}"


_NAMES = {"experts": "experts", "shared": "shared experts", "attention": "projections of attention"}


def _width(spec: Spec, part: str) -> int:
    """How many columns the first product of that part of the model has."""
    moe = spec.model.moe
    if part == "attention" or moe is None:
        return spec.model.attention.num_heads * spec.model.head_dim
    if part == "shared" and moe.shared is not None:
        return moe.shared.num_experts * (moe.shared.d_ff or moe.d_ff)
    return moe.d_ff
