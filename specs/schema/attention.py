"""The `model.attention` section."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from moegraph.specs.schema.base import Count, NonNegative, Positive, Section, Width

# A letter for each layer, repeated over the layers.
WindowPattern = Annotated[str, Field(pattern=r"^[LG]+$", max_length=4096)]
RopePattern = Annotated[str, Field(pattern=r"^[RN]+$", max_length=4096)]


class YarnScaling(Section):
    """YaRN context extension (arXiv 2309.00071). Waits for later work."""

    kind: Literal["yarn"]
    factor: Positive
    original_max_seq_len: Count
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    mscale: NonNegative = 1.0
    mscale_all_dim: NonNegative = 0.0
    truncate: bool = True


class LinearScaling(Section):
    """Positions divided by a constant. Waits for later work."""

    kind: Literal["linear"]
    factor: Positive


class Llama3Scaling(Section):
    """Low frequencies divided by `factor`, high ones kept, a ramp between (Llama 3.1). Waits for later work."""

    kind: Literal["llama3"]
    factor: Positive
    original_max_seq_len: Count
    low_freq_factor: Positive = 1.0
    high_freq_factor: Positive = 4.0


class LongRopeScaling(Section):
    """A factor for each frequency, one list within the original length, one beyond (arXiv 2402.13753). Waits for
    later work."""

    kind: Literal["longrope"]
    original_max_seq_len: Count
    short_factor: tuple[Positive, ...]
    long_factor: tuple[Positive, ...]
    short_mscale: Positive = 1.0
    long_mscale: Positive = 1.0


class Rope(Section):
    """Rotary position embedding (arXiv 2104.09864) on the first `fraction` of each head. `pattern` is repeated over
    the layers, R a layer with it, N one without."""

    theta: Annotated[float, Field(gt=1.0, le=1e12)] = 10000.0
    fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    interleaved: bool = False
    pattern: RopePattern = "R"
    scaling: (
        Annotated[YarnScaling | LinearScaling | Llama3Scaling | LongRopeScaling, Field(discriminator="kind")] | None
    ) = None


class Window(Section):
    """Sliding-window attention: `pattern` is repeated over the layers, L a layer with the window, G one without.
    `rope`, if given, is the rotary embedding of the L layers."""

    size: Annotated[int, Field(ge=1, le=2**30)]
    pattern: WindowPattern = "L"
    rope: Rope | None = None


class Chunk(Section):
    """Attention within aligned chunks of `size` tokens (Llama 4): L a layer with chunks, G one without. Waits for
    later work."""

    size: Annotated[int, Field(ge=1, le=2**30)]
    pattern: WindowPattern = "L"


class Temperature(Section):
    """On layers without rotary embedding, queries times 1 + scale · log(1 + floor(position / floor)) (Llama 4). Waits
    for later work."""

    scale: Positive = 0.1
    floor: Count = 8192


class Mla(Section):
    """Multi-head latent attention (arXiv 2405.04434). Waits for later work."""

    q_lora_rank: Width | None = None
    kv_lora_rank: Width
    qk_nope_head_dim: Width
    qk_rope_head_dim: Width
    v_head_dim: Width
    norm_eps: Positive = 1e-6


class AttentionExperts(Section):
    """Mixture of attention heads: query and output projections are chosen per token (arXiv 2404.07413). Waits for
    later work."""

    num_experts: Annotated[int, Field(ge=1, le=2**16)]
    top_k: Annotated[int, Field(ge=1, le=2**10)]


class Attention(Section):
    """Grouped-query attention. `num_kv_heads` defaults to `num_heads`, `head_dim` to d_model / num_heads, `scale` to
    head_dim^-1/2. `qk_norm` normalises queries and keys over each head, over the full width before heads are split,
    or (`l2`) without a weight; `qk_norm_after_rope` does it after the rotation. `clip_qkv` bounds their absolute
    values; `output_gate` multiplies the heads' output by a sigmoid of a projection of the input."""

    num_heads: Count
    num_kv_heads: Count | None = None
    head_dim: Width | None = None
    scale: Positive | None = None
    qk_norm: Literal["none", "per_head", "full", "l2"] = "none"
    qk_norm_after_rope: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    clip_qkv: Positive | None = None
    output_gate: bool = False
    window: Window | None = None
    chunk: Chunk | None = None
    rope: Rope | None = Field(default_factory=Rope)
    temperature: Temperature | None = None
    sinks: bool = False
    mla: Mla | None = None
    experts: AttentionExperts | None = None
