"""What a device can do at most in dense matrix products, for model FLOP utilisation (MFU).

Figures are the makers' dense ones, per device, without sparsity, in operations per second. A device that is not in the
table, and a part of one (a MIG slice), has no peak: MFU is then not shown rather than shown wrong.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

# In 10¹² operations per second. A name must contain the words in this order as whole words; the first row that fits
# holds, so a variant stands before its family; a variant without figures is not taken for its family.
_PEAKS: tuple[tuple[str, Mapping[str, float]], ...] = (
    ("GB300", {"bf16": 2500, "tf32": 1250, "fp8": 5000, "fp32": 80}),
    ("GB200", {"bf16": 2500, "tf32": 1250, "fp8": 5000, "fp32": 80, "fp64": 40}),
    ("B300", {"bf16": 2250, "tf32": 1125, "fp8": 4500, "fp32": 75}),
    ("B200", {"bf16": 2250, "tf32": 1125, "fp8": 4500, "fp32": 75, "fp64": 37}),
    ("H200 NVL", {"bf16": 835.5, "tf32": 417.5, "fp8": 1671, "fp32": 60, "fp64": 60}),
    ("H200", {"bf16": 989, "tf32": 494.5, "fp8": 1979, "fp32": 67, "fp64": 67}),
    ("GH200", {"bf16": 989, "tf32": 494.5, "fp8": 1979, "fp32": 67, "fp64": 67}),
    ("H100 PCIe", {"bf16": 756, "tf32": 378, "fp8": 1513, "fp32": 51, "fp64": 51}),
    ("H100 NVL", {"bf16": 835.5, "tf32": 417.5, "fp8": 1671, "fp32": 60, "fp64": 60}),
    ("H100", {"bf16": 989, "tf32": 494.5, "fp8": 1979, "fp32": 67, "fp64": 67}),
    ("H800", {"bf16": 989, "tf32": 494.5, "fp8": 1979, "fp32": 67}),
    ("H20", {"bf16": 148, "tf32": 74, "fp8": 296, "fp32": 44}),
    ("A100", {"bf16": 312, "tf32": 156, "fp32": 19.5, "fp64": 19.5}),
    ("A800", {"bf16": 312, "tf32": 156, "fp32": 19.5}),
    ("A40", {"bf16": 149.7, "tf32": 74.8, "fp32": 37.4}),
    ("A30", {"bf16": 165, "tf32": 82, "fp32": 10.3, "fp64": 10.3}),
    ("A10", {"bf16": 125, "tf32": 62.5, "fp32": 31.2}),
    ("L40S", {"bf16": 362, "tf32": 183, "fp8": 733, "fp32": 91.6}),
    ("L4", {"bf16": 121, "tf32": 60, "fp8": 242, "fp32": 30.3}),
    ("RTX 4090 D", {}),
    ("RTX 4090 Laptop", {}),
    ("RTX 4090", {"bf16": 165.2, "tf32": 82.6, "fp8": 330.3, "fp32": 82.6}),
    ("MI300X", {"bf16": 1307.4, "tf32": 653.7, "fp8": 2614.9, "fp32": 163.4, "fp64": 163.4}),
    ("MI325X", {"bf16": 1307.4, "tf32": 653.7, "fp8": 2614.9, "fp32": 163.4, "fp64": 163.4}),
)


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Dense matrix operations per second of a device, by the name its driver gives and the dtype of the products
    (bf16, fp16, tf32, fp32, fp64, fp8, mxfp8); None where it is not known, and for CPUs."""
    kind = {"fp16": "bf16", "mxfp8": "fp8"}.get(dtype, dtype)
    words = re.split(r"[^A-Z0-9]+", device_name.upper())
    if "MIG" in words:
        return None
    for name, peaks in _PEAKS:
        if _in_order(name.upper().split(), words):
            return peaks[kind] * 1e12 if kind in peaks else None
    return None


def utilisation(tokens_per_second: float, flops_per_token: float, peak: float | None, devices: int = 1) -> float | None:
    """MFU as a fraction: useful operations per second over what the devices can do; None without a peak."""
    return None if peak is None else tokens_per_second * flops_per_token / (peak * devices)


def _in_order(wanted: list[str], words: list[str]) -> bool:
    remaining = iter(words)
    return all(word in remaining for word in wanted)
