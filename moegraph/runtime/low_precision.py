"""What a device makes of 8-bit products and 8-bit rows: its matrix units run them, or they are emulated."""

from __future__ import annotations

import torch

from moegraph.specs.schema import Spec


def low_precision_text(spec: Spec, device: torch.device) -> str | None:
    """A sentence for the log: which products run in which format, whether this device has units for it, and whether
    rows travel in 8 bits; None where nothing is cast."""
    parts = [part for part in (_experts(spec, device), _dispatch(spec)) if part]
    return f"precision: {'; '.join(parts)}" if parts else None


def _experts(spec: Spec, device: torch.device) -> str | None:
    from moegraph.ops.mx_mm import mx_backend
    from moegraph.ops.scaled_mm import fp8_backend

    moe = spec.model.moe
    mx = spec.precision.mxfp8.experts != "off"
    if moe is None or not (mx or spec.precision.fp8 != "off"):
        return None
    backend, reason = (mx_backend if mx else fp8_backend)(moe.d_ff, spec.model.d_model, device)
    name = f"mxfp8 ({spec.precision.mxfp8.experts})" if mx else f"fp8 ({spec.precision.fp8})"
    how = "on matrix units of its own" if backend == "triton" else "emulated here: its numbers without its speed"
    return f"experts in {name}, {how}: {reason}"


def _dispatch(spec: Spec) -> str | None:
    dispatch = spec.precision.mxfp8.dispatch
    if dispatch == "off":
        return None
    where = "" if spec.layout.ep > 1 else ", and none does with ep 1"
    return f"rows travel to experts in mxfp8 ({dispatch}){where}"
