"""How a kernel is tiled: the choices that change its speed and never its result's meaning.

`default_config` is the rule for a dtype, a shape and a chip; measured choices live in tuning tables (`tuning.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from moegraph.kernels.chips import CHIPS

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Config:
    """block_m rows by block_n columns per tile, block_k of the contraction per step; group_m row blocks share their
    weights in L2; parts is how many column slices an epilogue works in; flatten lets the next tile's loads start
    during an epilogue; separate runs what is fused into the product as a kernel of its own: the gather of up_swiglu,
    the epilogue of dgrad_swiglu."""

    block_m: int = 128
    block_n: int = 256
    block_k: int = 64
    num_warps: int = 8
    num_stages: int = 3
    group_m: int = 8
    parts: int = 1
    flatten: bool = False
    separate: bool = False

    def __str__(self) -> str:
        text = f"{self.block_m}×{self.block_n}×{self.block_k} warps {self.num_warps} stages {self.num_stages}"
        text += f" group {self.group_m}" + (f" parts {self.parts}" if self.parts > 1 else "")
        return text + (" flatten" if self.flatten else "") + (" separate" if self.separate else "")


def shared_memory(kernel: str, config: Config, dtype: torch.dtype, capability: int = 90) -> int:
    """An estimate of the shared memory a block takes, in bytes: the pipelined operands, and what the epilogue stages.

    For the rule's tiles in 16 bits within 100 bytes of what Triton 3.6 allocates, or above it; others may take a tile
    more. Slices of a tile that are stored one after the other share a place on sm_90, and have one each on 10.x.
    """
    c, size = config, max(dtype.itemsize, 2)  # of the result: bf16 for FP8 operands
    loads = c.num_stages * (c.block_m + c.block_n) * c.block_k * dtype.itemsize
    if kernel == "up_swiglu":
        return loads + c.block_m * c.block_n * size // c.parts  # gate and up as stored, and the activation
    if kernel == "dgrad_swiglu" and not c.separate:
        return loads + 2 * c.block_m * (c.block_n // c.parts) * size
    return loads + c.block_m * (c.block_n // (c.parts if capability // 10 == 9 else 1)) * size


def _fit(size: int, most: int, least: int = 16) -> int:
    """The smallest power of two that covers `size`, between `least` and `most`."""
    block = least
    while block < size and block < most:
        block *= 2
    return block


def default_config(kernel: str, dtype: torch.dtype, n: int, k: int, capability: int = 90) -> Config:
    """The rule: n output columns (of the activation for up_swiglu), k the contraction (rows for wgrad's output), for
    compute capability `capability`, 10 · major + minor.

    16 bits on Hopper: 128 × 256 × 64, eight warps (measured on H200, docs/performance.md). fp32 has no room for such
    tiles: 32 × 64 × 32. Data-centre Blackwell (10.x) has the tiles of Hopper and as many stages, up to four, as its
    shared memory holds.
    """
    config = _hopper(kernel, dtype, n, k)
    if kernel == "dgrad_swiglu" and dtype != torch.float32 and capability // 10 == 10:
        wide = _fit(n, 256 if dtype != FP8 else 128, 64)
        config = Config(block_n=wide, block_k=_fit(k, 64 if dtype.itemsize > 1 else 128), parts=wide // 64)
    if capability // 10 != 10 or dtype == torch.float32:
        return config
    if kernel == "up_swiglu" and dtype == FP8:  # wider, scaling and splitting the accumulator spills
        config = replace(config, block_n=min(config.block_n, 128), parts=1, flatten=False)
    limit = CHIPS.get(capability, CHIPS[100]).shared_limit
    deeper = (replace(config, num_stages=stages) for stages in (4, 3, 2))
    return next((each for each in deeper if shared_memory(kernel, each, dtype, capability) <= limit), config)


def exact_config(config: Config) -> Config:
    """For FP8 products that accumulate in fp32 every few steps: a second accumulator's worth of registers."""
    return replace(config, block_n=min(config.block_n, 128), num_stages=4, parts=1)


def _hopper(kernel: str, dtype: torch.dtype, n: int, k: int) -> Config:
    if dtype == FP8:
        return _hopper_fp8(kernel, n, k)
    if dtype == torch.float32:
        return Config(32, _fit(n, 64, 32), _fit(k, 32), num_warps=4, num_stages=2, parts=1)
    if kernel == "up_swiglu":
        return Config(block_n=2 * _fit(n, 128), block_k=_fit(k, 64))
    if kernel == "wgrad":
        return Config(block_m=_fit(n, 128), block_n=_fit(k, 256), block_k=64, flatten=True)
    separate = kernel == "dgrad_swiglu"
    return Config(block_n=_fit(n, 256, 32), block_k=_fit(k, 64), parts=2, flatten=True, separate=separate)


def _hopper_fp8(kernel: str, n: int, k: int) -> Config:
    """Tiles of 16 bits with twice the depth: as many bytes."""
    if kernel == "up_swiglu":
        return Config(block_n=2 * _fit(n, 128), block_k=_fit(k, 128, 32), parts=2, flatten=True)
    if kernel == "wgrad":
        return Config(block_m=_fit(n, 128, 64), block_n=_fit(k, 256), block_k=128, flatten=True)
    separate = kernel == "dgrad_swiglu"
    return Config(block_n=_fit(n, 256, 32), block_k=_fit(k, 128, 32), parts=2, flatten=True, separate=separate)


def block_config(n: int) -> Config:
    """The rule for FP8 products with scales per 128 of the contraction: as `exact_config`."""
    return Config(block_n=_fit(n, 128, 32), block_k=128, num_stages=4)


def mx_config(kernel: str, n: int, k: int) -> Config:
    """The rule for MXFP8 on data-centre Blackwell, not measured: 128 rows, because a block of scales has as many."""
    wide = _fit(n, 256 if kernel != "up_swiglu" else 128, 128)
    if kernel == "up_swiglu":
        return Config(block_n=2 * wide, block_k=128, num_stages=3, parts=2)
    if kernel == "dgrad_swiglu_saved":  # wider tiles spill, and so do, below, wider slices
        return Config(block_n=128, block_k=128, num_stages=4, parts=4)
    slices = {"dgrad_swiglu": wide // 64, "dgrad_swiglu_quantized": wide // 32}
    return Config(block_n=wide, block_k=128, num_stages=3, parts=slices.get(kernel, 2))


def mx_wgrad_config(n: int, k: int) -> Config:
    """The rule for MXFP8 weight gradients on data-centre Blackwell, not measured: whole blocks of scales, 128 rows per
    step."""
    return Config(block_m=128, block_n=_fit(k, 256, 128), block_k=128, num_stages=3, parts=2)


def payload_wgrad_config(n: int, k: int, turned: bool, capability: int = 90) -> Config:
    """The rule for weight gradients that dequantise a payload as it loads; turned: that of the rows. On an H200 it was
    the best or near it of seven tiles (`moegraph.benchmarks.payload_wgrad`).

    On Hopper two programs of four warps share a multiprocessor: one dequantises while the other multiplies. Elsewhere
    as in `wgrad`: 128 columns of the payload by 256 of the other operand.
    """
    payload, other = (k, n) if turned else (n, k)
    wide = _fit(other, 128 if capability // 10 == 9 else 256, 64)
    tall = _fit(payload, 128, 64)
    m, n = (wide, tall) if turned else (tall, wide)
    return Config(block_m=m, block_n=n, block_k=64, num_warps=4 if capability // 10 == 9 else 8, num_stages=3)


def rule_reason(dtype: torch.dtype, capability: int | None) -> str:
    """Why the rule says what it says for a chip (None: no CUDA device), for people."""
    if capability is None:
        return "no CUDA device: the rule for sm_90"
    if dtype == torch.float32:
        return "by rule, not measured here: fp32 operands leave no room for larger tiles"
    if capability // 10 == 10:
        return (
            "by rule, not measured: the tiles of sm_90 (a 128 × 256 accumulator takes half of tensor memory), and as "
            f"many stages, up to 4, as {CHIPS[100].shared_limit >> 10} KiB of shared memory hold: a matrix unit twice "
            "as fast needs more loads in flight"
        )
    if capability == 90:
        return "by rule, not measured at this shape: what was best on H200 at others (docs/performance.md)"
    return f"by rule, not measured: the rule for sm_90, on sm_{capability}"
