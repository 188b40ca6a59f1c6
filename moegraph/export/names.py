"""The tensors of a published checkpoint, and which elements of ours each is made of.

Ours                                     theirs
layers.1.moe.w_up    [E, 2F, D]          model.layers.1.mlp.experts.7.gate_proj.weight [F, D], up_proj, or packed
layers.1.moe.w_down  [E, D, F]           model.layers.1.mlp.experts.7.down_proj.weight [D, F], or packed
layers.0.dense.w_up  [2F, D]             model.layers.0.mlp.gate_proj.weight [F, D], up_proj.weight

Contract: a tensor is a sequence of pieces, each a run of elements of one of ours in the order of memory, so that it is
written with one piece in memory at a time. Packed experts have a piece for each expert.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from moegraph.export.rules import shared_width
from moegraph.specs.schema.model import Model

if TYPE_CHECKING:
    from torch import Tensor

NO_SINK = -1e9  # e to this is 0 in every dtype: a sink that takes nothing


@dataclass(frozen=True)
class Published:
    """A tensor `name` of `shape`, `count` pieces of `piece` elements' shape from element `start` of `source` on, each
    as `arrange` turns it; without a source, `value` throughout. `wide`: kept in float32."""

    name: str
    shape: tuple[int, ...]
    source: str | None
    start: int = 0
    count: int = 1
    piece: tuple[int, ...] = ()
    arrange: Callable[[Tensor], Tensor] | None = None
    wide: bool = False
    value: float = 0.0

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Names:
    """What an architecture calls things within `model.layers.N`.

    `experts`: `each` has three matrices of its own, called `each`; `packed` is [E, 2F, D] and [E, D, F]; `pairs` is
    transposed, with gate and up in turns, and biases. `select_bias`, `shared`, `shared_gate`: where they are, if the
    architecture has them; `shared_packed`: gate and up are one matrix. `sinks`: attention has them.
    """

    block: str = "mlp"
    router: str = "gate"
    experts: Literal["each", "packed", "pairs"] = "each"
    each: tuple[str, str, str] = ("experts.{}.gate_proj", "experts.{}.up_proj", "experts.{}.down_proj")
    packed: tuple[str, str] = ("", "")
    select_bias: str | None = None
    select_bias_row: bool = False  # [1, E]
    shared: str = ""
    shared_gate: str = ""
    shared_packed: tuple[str, str] | None = None
    sinks: bool = False


def published_tensors(model: Model, names: Names) -> Iterator[Published]:
    """Every tensor of the published checkpoint of a model, in the order of the model."""
    yield _whole("model.embed_tokens.weight", "embedding.weight", model.vocab_size, model.d_model)
    for layer in range(model.num_layers):
        ours, theirs = f"layers.{layer}.", f"model.layers.{layer}."
        yield from _attention(model, names, ours, theirs)
        if model.is_dense(layer):
            assert model.dense is not None
            yield from _swiglu(f"{ours}dense", f"{theirs}mlp", model.d_model, model.dense.d_ff)
        else:
            yield from _experts(model, names, ours, f"{theirs}{names.block}.")
        yield from _norms(model, layer, ours, theirs)
    yield _whole("model.norm.weight", "head.norm.weight", model.d_model)
    if not model.tie_embeddings:
        yield _whole("lm_head.weight", "head.weight", model.vocab_size, model.d_model)


def _whole(name: str, source: str, *shape: int, wide: bool = False) -> Published:
    return Published(name, shape, source, piece=shape, wide=wide)


def _norms(model: Model, layer: int, ours: str, theirs: str) -> Iterator[Published]:
    block = "dense" if model.is_dense(layer) else "moe"
    after = model.norm.placement == "post"
    norm = "post_norm" if after else "norm"
    attention, feed_forward = (
        ("post_attention_layernorm", "post_feedforward_layernorm")
        if after
        else ("input_layernorm", "post_attention_layernorm")
    )
    yield _whole(f"{theirs}{attention}.weight", f"{ours}attention.{norm}.weight", model.d_model)
    yield _whole(f"{theirs}{feed_forward}.weight", f"{ours}{block}.{norm}.weight", model.d_model)


def _attention(model: Model, names: Names, ours: str, theirs: str) -> Iterator[Published]:
    attention, dim = model.attention, model.head_dim
    ours, theirs = f"{ours}attention.", f"{theirs}self_attn."
    widths = {"q": attention.num_heads * dim, "k": model.num_kv_heads * dim, "v": model.num_kv_heads * dim}
    for name, width in widths.items():
        yield _whole(f"{theirs}{name}_proj.weight", f"{ours}{name}.weight", width, model.d_model)
        if attention.qkv_bias:
            yield _whole(f"{theirs}{name}_proj.bias", f"{ours}{name}.bias", width)
        if name != "v" and attention.qk_norm != "none":
            size = dim if attention.qk_norm == "per_head" else width
            yield _whole(f"{theirs}{name}_norm.weight", f"{ours}{name}_norm.weight", size)
    yield _whole(f"{theirs}o_proj.weight", f"{ours}output.weight", model.d_model, widths["q"])
    if attention.output_bias:
        yield _whole(f"{theirs}o_proj.bias", f"{ours}output.bias", model.d_model)
    if names.sinks:
        yield Published(f"{theirs}sinks", (attention.num_heads,), None, value=NO_SINK)


def _swiglu(ours: str, theirs: str, d_model: int, d_ff: int) -> Iterator[Published]:
    half = (d_ff, d_model)
    yield Published(f"{theirs}.gate_proj.weight", half, f"{ours}.w_up", piece=half)
    yield Published(f"{theirs}.up_proj.weight", half, f"{ours}.w_up", start=d_ff * d_model, piece=half)
    yield _whole(f"{theirs}.down_proj.weight", f"{ours}.w_down", d_model, d_ff)


def _experts(model: Model, names: Names, ours: str, theirs: str) -> Iterator[Published]:
    moe, d_model = model.moe, model.d_model
    assert moe is not None
    count = moe.num_experts
    yield _whole(f"{theirs}{names.router}.weight", f"{ours}moe.router.weight", count, d_model, wide=True)
    if moe.router.gate_bias or names.experts == "pairs":
        source = f"{ours}moe.router.bias" if moe.router.gate_bias else None
        yield Published(f"{theirs}{names.router}.bias", (count,), source, piece=(count,), wide=True)
    if names.select_bias is not None:
        source = f"{ours}moe.select_bias" if moe.router.select_bias != "none" else None
        shape = (1, count) if names.select_bias_row else (count,)
        yield Published(f"{theirs}{names.select_bias}", shape, source, piece=shape, wide=True)
    if names.experts == "each":
        yield from _each_expert(names, f"{ours}moe", theirs, count, d_model, moe.d_ff)
    elif names.experts == "packed":
        up, down = names.packed
        yield _whole(f"{theirs}{up}", f"{ours}moe.w_up", count, 2 * moe.d_ff, d_model)
        yield _whole(f"{theirs}{down}", f"{ours}moe.w_down", count, d_model, moe.d_ff)
    else:
        yield from _pairs(f"{ours}moe", theirs, count, d_model, moe.d_ff, biases=moe.expert_bias)
    if moe.shared is not None:
        yield from _shared(model, names, ours, theirs)


def _each_expert(names: Names, ours: str, theirs: str, count: int, d_model: int, d_ff: int) -> Iterator[Published]:
    size, half = d_ff * d_model, (d_ff, d_model)
    gate, up, down = names.each
    for e in range(count):
        yield Published(f"{theirs}{gate.format(e)}.weight", half, f"{ours}.w_up", 2 * e * size, piece=half)
        yield Published(f"{theirs}{up.format(e)}.weight", half, f"{ours}.w_up", (2 * e + 1) * size, piece=half)
        turned = (d_model, d_ff)
        yield Published(f"{theirs}{down.format(e)}.weight", turned, f"{ours}.w_down", e * size, piece=turned)


def _pairs(ours: str, theirs: str, count: int, d_model: int, d_ff: int, *, biases: bool) -> Iterator[Published]:
    up, down = f"{theirs}experts.gate_up_proj", f"{theirs}experts.down_proj"
    yield Published(
        up, (count, d_model, 2 * d_ff), f"{ours}.w_up", 0, count, (2 * d_ff, d_model), lambda x: in_turns(x).t()
    )
    yield Published(down, (count, d_ff, d_model), f"{ours}.w_down", 0, count, (d_model, d_ff), lambda x: x.t())
    for name, source, width, arrange in ((up, "up", 2 * d_ff, in_turns), (down, "down", d_model, None)):
        shape = (count, width)
        if biases:
            yield Published(f"{name}_bias", shape, f"{ours}.{source}.bias", 0, count, (width,), arrange)
        else:
            yield Published(f"{name}_bias", shape, None)


def in_turns(x: Tensor) -> Tensor:
    """[2F, …], all of gate and then all of up → gate, up, gate, up …"""
    gate, up = x.chunk(2)
    both: Tensor = x.new_empty(x.shape)
    both[::2], both[1::2] = gate, up
    return both


def _shared(model: Model, names: Names, ours: str, theirs: str) -> Iterator[Published]:
    width = shared_width(model)
    layer = theirs.removesuffix(f"{names.block}.")
    if names.shared_packed is not None:
        up, down = names.shared_packed
        yield _whole(f"{layer}{up}", f"{ours}shared.w_up", 2 * width, model.d_model)
        yield _whole(f"{layer}{down}", f"{ours}shared.w_down", model.d_model, width)
        return
    yield from _swiglu(f"{ours}shared", f"{layer}{names.shared}", model.d_model, width)
    if names.shared_gate:
        yield _whole(f"{layer}{names.shared_gate}.weight", f"{ours}shared.gate.weight", 1, model.d_model)
