"""Initial values of parameters.

Contract: a value is a function of (seed, name of the parameter, global index of the expert) and of nothing else: not of
the rank, the device, the number of threads, the precision, or which other parameters are made and in what order. So
every layout starts from the same model, and no two layers or experts start alike.

Each tensor, and each expert of an expert tensor, has a CPU generator of its own, seeded with SHA-256 of
"seed|name|expert". Values are made in float32 and then converted, so a float64 run starts where a float32 run does.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable

import torch
from torch import Tensor

from moegraph.graph.program import Parameter

_CUT = 3.0  # the normal distribution is cut at this many standard deviations


def initial_values(parameters: Iterable[Parameter], seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """The starting value of each parameter and buffer, on the CPU, in `dtype` (float32 or float64), by name."""
    return {parameter.name: initial_value(parameter, seed, dtype) for parameter in parameters}


def initial_value(parameter: Parameter, seed: int, dtype: torch.dtype, experts: range | None = None) -> Tensor:
    """The starting value of one parameter on the CPU. `experts` (default all) picks global expert indices of an expert
    tensor: the result is those rows of axis 0 of the whole, bit for bit."""
    shape = parameter.shape
    if experts is not None:
        if not parameter.experts:
            raise ValueError(f"{parameter.name} has no expert axis to take {experts} of")
        shape = (len(experts), *shape[1:])
    if parameter.init == "ones":
        return torch.ones(shape, dtype=dtype)
    if parameter.init == "zeros":
        return torch.zeros(shape, dtype=dtype)
    value = torch.empty(shape, dtype=torch.float32)
    if parameter.experts:
        for row, expert in zip(value, experts if experts is not None else range(shape[0]), strict=True):
            _fill_truncated_normal(row, parameter.std, _generator(seed, parameter.name, expert))
    else:
        _fill_truncated_normal(value, parameter.std, _generator(seed, parameter.name, None))
    return value.to(dtype)


def _generator(seed: int, name: str, expert: int | None) -> torch.Generator:
    key = f"{seed}|{name}|{'-' if expert is None else expert}"
    digest = hashlib.sha256(key.encode()).digest()
    return torch.Generator(device="cpu").manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def _fill_truncated_normal(out: Tensor, std: float, generator: torch.Generator) -> None:
    """Fills float32 `out` in place: uniform numbers through the inverse of the cut normal distribution function."""
    edge = math.erf(_CUT / math.sqrt(2.0))
    out.uniform_(-edge, edge, generator=generator)
    out.erfinv_().mul_(std * math.sqrt(2.0)).clamp_(-_CUT * std, _CUT * std)
