"""What a device makes of 8-bit products: its matrix units run them, or they are emulated."""

from __future__ import annotations

import torch

from moegraph.specs.schema import Spec


def low_precision_text(spec: Spec, device: torch.device) -> str:
    """A sentence for the log: which products run in which format, and whether this device has units for it."""
    from moegraph.ops.mx_mm import mx_backend
    from moegraph.ops.scaled_mm import fp8_backend

    moe = spec.model.moe
    assert moe is not None
    mx = spec.precision.mxfp8.experts != "off"
    backend, reason = (mx_backend if mx else fp8_backend)(moe.d_ff, spec.model.d_model, device)
    name = f"mxfp8 ({spec.precision.mxfp8.experts})" if mx else f"fp8 ({spec.precision.fp8})"
    how = "on matrix units of its own" if backend == "triton" else "emulated here: its numbers without its speed"
    return f"precision: experts in {name}, {how}: {reason}"
