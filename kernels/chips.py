"""The chips that kernels are written for, and the card that a device is.

A *chip* is a compute capability; a *card* is a product with one, by the name its driver gives. Configurations are
measured per card and compiled per chip.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from moegraph.errors import UsageError


class Chip(NamedTuple):
    """A compute capability: what people call it, multiprocessors, the shared memory a block may take (bytes), its
    instruction for products of 16-bit tiles, and the card that stands for it where there is none."""

    title: str
    processors: int
    shared_limit: int
    matrix_instruction: str
    card: str


CHIPS = {
    90: Chip("sm_90 (H100, H200)", 132, 232_448, "wgmma", "NVIDIA H200"),
    100: Chip("sm_100 (B200)", 148, 232_448, "tcgen05.mma", "NVIDIA B200"),
    103: Chip("sm_103 (B300)", 148, 232_448, "tcgen05.mma", "NVIDIA B300 SXM6 AC"),
}
ARCHS = {f"sm_{capability}": capability for capability in CHIPS}


class Card(NamedTuple):
    """A card by the name its driver gives, and its compute capability as 10 · major + minor."""

    name: str
    capability: int


@functools.lru_cache(maxsize=64)
def card_of(device: torch.device) -> Card | None:
    """The card of a CUDA device; None for any other device."""
    if device.type != "cuda":
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return Card(str(torch.cuda.get_device_name(device)), 10 * major + minor)


def card_for(arch: str | None) -> Card:
    """The card to look at for `arch` (`sm_90`, `sm_100`, `sm_103`): this machine's where it is one, else the chip's
    usual card. Without an arch: this machine's card, else an H200. Raises UsageError for another arch or chip."""
    here = card_of(torch.device("cuda")) if torch.cuda.is_available() else None
    if arch is None:
        if here is not None and here.capability not in CHIPS:
            raise UsageError(f"no kernels are written for {here.name}, sm_{here.capability}: --arch {', '.join(ARCHS)}")
        return here or Card(CHIPS[90].card, 90)
    if arch not in ARCHS:
        raise UsageError(f"--arch {arch}: one of {', '.join(ARCHS)}")
    capability = ARCHS[arch]
    return here if here is not None and here.capability == capability else Card(CHIPS[capability].card, capability)
