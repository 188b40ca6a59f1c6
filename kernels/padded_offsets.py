"""Where experts' runs end once each is padded to tiles of 128 rows: the offsets of a product over padded rows.

    padded[e] = Σ_{i ≤ e} 128 · ceil(rows of expert i / 128)

Legend: E experts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moegraph.kernels.config import Config
from moegraph.kernels.launch import Launch

_CONFIG = Config(num_warps=4)


@triton.jit
def padded_offsets_kernel(offsets_ptr, padded_ptr, E: tl.constexpr, E_PAD: tl.constexpr):
    """One program for all experts."""
    e = tl.arange(0, E_PAD)
    end = tl.load(offsets_ptr + e, mask=e < E, other=0)
    begin = tl.load(offsets_ptr + e - 1, mask=(e > 0) & (e < E), other=0)
    tl.store(padded_ptr + e, tl.cumsum((end - begin + 127) // 128 * 128, 0), mask=e < E)


def padded_offsets_launch(offsets: Tensor, padded: Tensor) -> Launch:
    """The launch that writes `padded` [E] int32."""
    experts = offsets.shape[0]
    constants = {"E": experts, "E_PAD": triton.next_power_of_2(experts)}
    arguments = {"offsets_ptr": offsets, "padded_ptr": padded}
    return Launch(padded_offsets_kernel, (1,), arguments, constants, _CONFIG)


def padded_offsets(offsets: Tensor) -> Tensor:
    """offsets [E] int32 → padded [E] int32."""
    padded = torch.empty_like(offsets)
    padded_offsets_launch(offsets, padded).run()
    return padded
