"""What the machines that a step's time is predicted for can do, and which part of it kernels reach.

Peaks are the makers' figures, dense, per device. The shares are what moegraph's and torch's kernels reached on H200
(docs/performance.md); nothing of them was measured on B300, where they are an assumption.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

PRODUCTS = 0.68  # of the peak: grouped and dense products under a sustained load, 640 to 720 of 989
ATTENTION = 0.5  # of the peak: cuDNN, causal, forward and backward, 509 of 989
MEMORY = 0.88  # of the bandwidth: a copy, 4.2 of 4.8 TB/s
LINK = 0.7  # of a link in one direction: rows put by Triton or sent by NCCL with their permute, 250 to 350 of 450


@dataclass(frozen=True)
class Machine:
    """Operations per second by format of the operands, bytes per second of memory, and bytes per second that a device
    sends to the others of its host while it receives as much."""

    name: str
    peaks: Mapping[str, float]
    memory: float
    link: float


MACHINES = {
    "B300": Machine("B300", {"bf16": 2250e12, "fp8": 4500e12, "fp32": 75e12}, 8.0e12, 900e9),
    "H200": Machine("H200", {"bf16": 989e12, "fp8": 1979e12, "fp32": 67e12}, 4.8e12, 450e9),
}
