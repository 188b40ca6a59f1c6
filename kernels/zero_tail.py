"""Zeros in the rows past the last offset: those of a buffer that routing did not fill.

Products of experts compute only the rows that exist. Without a tail, as on one rank, this is an empty launch.

Legend: R rows, E experts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moegraph.kernels.config import Config
from moegraph.kernels.launch import Launch, persistent_programs

_BLOCK = 4096  # elements at a time
_CONFIG = Config(num_warps=4)
_PROGRAMS = 4  # per multiprocessor


@triton.jit
def zero_tail_kernel(out_ptr, offsets_ptr, total, width, E: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):
    """PROGRAMS programs take blocks of the tail in turn; `total` elements, `width` in a row."""
    start = tl.load(offsets_ptr + E - 1).to(tl.int64) * width
    size = total - start
    zeros = tl.zeros((BLOCK,), out_ptr.dtype.element_ty)
    for first in range(tl.program_id(0).to(tl.int64) * BLOCK, size, PROGRAMS * BLOCK):
        at = first + tl.arange(0, BLOCK)
        tl.store(out_ptr + start + at, zeros, mask=at < size)


def zero_tail_launch(out: Tensor, offsets: Tensor) -> Launch:
    """The launch that zeroes out[offsets[-1]:], `out` [R, ..] contiguous."""
    if out.element_size() == 1:
        out = out.view(torch.uint8)
    programs = _PROGRAMS * persistent_programs(out.device)
    arguments = {
        "out_ptr": out,
        "offsets_ptr": offsets,
        "total": out.numel(),
        "width": out.numel() // max(out.shape[0], 1),
    }
    constants = {"E": offsets.shape[0], "PROGRAMS": programs, "BLOCK": _BLOCK}
    return Launch(zero_tail_kernel, (programs,), arguments, constants, _CONFIG)


def zero_tail(offsets: Tensor, *outs: Tensor) -> None:
    """Zeroes the rows past the last offset of each of `outs` [R, ..], contiguous."""
    for out in outs:
        if out.numel():
            zero_tail_launch(out, offsets).run()
