"""The `model.mixers` section: layers that mix tokens by something else than attention. Waits for later work."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from moegraph.specs.schema.base import Count, Section, Width


class GatedDeltaNet(Section):
    """Gated delta rule (arXiv 2412.06464), as in Qwen3-Next."""

    num_key_heads: Count
    num_value_heads: Count
    key_head_dim: Width
    value_head_dim: Width
    conv_kernel: Annotated[int, Field(ge=1, le=64)] = 4


class ShortConv(Section):
    """A gated short causal convolution, as in LFM2."""

    kernel: Annotated[int, Field(ge=1, le=64)] = 3
    bias: bool = False


class Mixers(Section):
    """`pattern` is repeated over the layers: A attention, D gated delta net, C short convolution."""

    pattern: Annotated[str, Field(pattern=r"^[ADC]+$", max_length=4096)]
    gated_delta_net: GatedDeltaNet | None = None
    short_conv: ShortConv | None = None
