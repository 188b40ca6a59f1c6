"""Comparing two executions: largest relative differences of outputs and gradients, and the first node that differs."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moegraph.graph.program import Port
from moegraph.verify.run import Execution


@dataclass(frozen=True)
class Difference:
    """Largest relative difference ‖a - b‖∞ / ‖b‖∞ of outputs and of gradients; the first node whose value differs, or,
    when the nodes of both sides have no names in common, the first output or gradient."""

    outputs: float
    gradients: float
    first_node: str | None
    missing: tuple[str, ...] = ()

    def within(self, tolerance: float) -> bool:
        """Whether both stay within the tolerance and nothing is missing."""
        return self.outputs <= tolerance and self.gradients <= tolerance and not self.missing


_TINY = sys.float_info.min


def relative_difference(a: Tensor, b: Tensor) -> float:
    """‖a - b‖∞ / ‖b‖∞ over the finite values: 0.0 if and only if all are equal, NaNs and infinities in the same places
    included; infinity where shapes, dtypes, NaNs or infinities differ."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    if torch.equal(a, b):
        return 0.0
    if not a.is_floating_point():
        return float("inf")
    a, b = a.double(), b.double()
    nan, infinite, finite = b.isnan(), b.isinf(), b.isfinite()
    if not (torch.equal(a.isnan(), nan) and torch.equal(a.isinf(), infinite) and torch.equal(a[infinite], b[infinite])):
        return float("inf")
    a, b = a[finite], b[finite]
    if torch.equal(a, b):
        return 0.0
    largest = float(b.abs().max())
    return max(float((a - b).abs().max()) / max(largest, _TINY), _TINY)


def compare(before: Execution, after: Execution, tolerance: float) -> Difference:
    """How `after` differs from `before`, over everything `before` has."""
    by_name = {_key(port): value for port, value in after.results.items()}
    again = {_key(port): value for port, value in after.again.items()}
    worst = {"outputs": 0.0, "gradients": 0.0}
    missing: list[str] = []
    first_port: str | None = None
    for port, value in before.results.items():
        key = _key(port)
        if key not in by_name or (again and key not in again):
            missing.append(f"{port.role} {port.name}")
            continue
        side = "gradients" if port.role in ("grad", "grad_input") else "outputs"
        for found in (by_name[key], again.get(key, by_name[key])):
            difference = relative_difference(found, value)
            worst[side] = max(worst[side], difference)
            if difference > tolerance:
                first_port = first_port or f"{port.role} {port.name}"
    first = first_port and (_first_difference(before.values, after.values, tolerance) or first_port)
    return Difference(worst["outputs"], worst["gradients"], first, tuple(missing))


def _key(port: Port) -> tuple[str, str]:
    """A metric that a pass made differentiable is still the same output."""
    return ("output" if port.role in ("metric", "auxiliary", "hidden", "loss") else port.role, port.name)


def _first_difference(before: Mapping[str, Any], after: Mapping[str, Any], tolerance: float) -> str | None:
    for name, value in after.items():
        if name in before and _value_difference(value, before[name]) > tolerance:
            return name
    return None


def _value_difference(a: Any, b: Any) -> float:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return relative_difference(a, b)
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)) and len(a) == len(b):
        return max(map(_value_difference, a, b), default=0.0)
    return float("inf")


def sqnr(reference: Tensor, found: Tensor) -> float:
    """Signal to quantisation noise, 10 · log10(Σ reference² / Σ (reference - found)²) in dB; infinity where all are
    equal."""
    reference, found = reference.double(), found.double()
    noise = float((reference - found).square().sum())
    return math.inf if noise == 0 else 10 * math.log10(max(float(reference.square().sum()), _TINY) / noise)


def signal_to_noise(expected: Sequence[Execution], found: Sequence[Execution]) -> str:
    """The least `sqnr` over all ranks of each floating-point result that changed, worst first."""
    least: dict[str, float] = {}
    for was, now in zip(expected, found, strict=True):
        for port, value in was.results.items():
            if value.is_floating_point() and port in now.results and now.results[port].shape == value.shape:
                name = f"gradient of {port.name}" if port.role in ("grad", "grad_input") else port.name
                least[name] = min(least.get(name, math.inf), sqnr(value, now.results[port]))
    changed = sorted((each, name) for name, each in least.items() if each < math.inf)
    return ", ".join(f"{name} {each:.1f} dB" for each, name in changed)
