"""The `model` section: what is computed, independent of how it is laid out over devices."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from moegraph.specs.schema.attention import Attention, Mla, Rope, Window
from moegraph.specs.schema.base import Count, Index, NonNegative, Positive, Section, Width
from moegraph.specs.schema.mixers import Mixers
from moegraph.specs.schema.moe import Moe


class Norm(Section):
    """Normalisation of the residual stream: before each sub-layer, after it (on its output, before the residual
    addition), or both. `layer` subtracts the mean as well, and may have a bias."""

    kind: Literal["rms", "layer"] = "rms"
    bias: bool = False
    eps: Annotated[float, Field(gt=0.0, le=1.0)] = 1e-6
    placement: Literal["pre", "post", "both"] = "pre"


class Dense(Section):
    """Layers with an ordinary SwiGLU feed-forward instead of experts; `layers` are indices from 0, or "all". A
    model without experts may leave `layers` out."""

    d_ff: Width
    layers: Literal["all"] | tuple[Index, ...] = ()


class MultiTokenPrediction(Section):
    """Extra heads that predict further tokens (arXiv 2404.19737). Waits for later work."""

    depth: Count
    coef: NonNegative = 0.1


class Initialisation(Section):
    """Initial values: normal with `std`, cut at three deviations; `scale_depth` divides the output projections' by
    sqrt(2 · num_layers)."""

    std: Annotated[float, Field(gt=0.0, le=100.0)] = 0.02
    scale_depth: bool = True


class Model(Section):
    """A decoder-only transformer whose feed-forward layers are mixtures of experts, dense, or both."""

    vocab_size: Annotated[int, Field(ge=2, le=2**24)]
    d_model: Width
    num_layers: Annotated[int, Field(ge=1, le=4096)]
    max_seq_len: Annotated[int, Field(ge=1, le=2**26)] = 4096
    norm: Norm = Field(default_factory=Norm)
    attention: Attention
    mixers: Mixers | None = None
    dense: Dense | None = None
    moe: Moe | None = None
    tie_embeddings: bool = False
    head_bias: bool = False
    embedding_scale: Positive = 1.0
    residual_scale: Positive = 1.0
    logit_scale: Positive = 1.0
    multi_token_prediction: MultiTokenPrediction | None = None
    init: Initialisation = Field(default_factory=Initialisation)

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.attention.head_dim or self.d_model // self.attention.num_heads

    @property
    def num_kv_heads(self) -> int:
        """Number of key/value heads."""
        return self.attention.num_kv_heads or self.attention.num_heads

    def is_dense(self, layer: int) -> bool:
        """Whether this layer has an ordinary feed-forward instead of experts."""
        if self.moe is None:
            return True
        return self.dense is not None and (self.dense.layers == "all" or layer in self.dense.layers)

    def window(self, layer: int) -> int | None:
        """The sliding-window size of this layer in tokens, or None for full attention."""
        window = self.attention.window
        if window is None or window.pattern[layer % len(window.pattern)] == "G":
            return None
        return window.size


__all__ = ["Attention", "Dense", "Initialisation", "Mla", "Model", "MultiTokenPrediction", "Norm", "Rope", "Window"]
