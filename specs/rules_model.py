"""Rules of the `model` section outside `moe`: heads, rotary width, windows, which layers are dense."""

from __future__ import annotations

from moegraph.specs.rules import Report, Rule, divisors, listing
from moegraph.specs.schema.spec import Spec

MAX_ELEMENTS = 2**48  # of one parameter; 512 TiB in bf16


def kv_heads_divide_heads(spec: Spec, report: Report) -> None:
    """Each key/value head serves the same number of query heads."""
    heads, kv_heads = spec.model.attention.num_heads, spec.model.num_kv_heads
    if heads % kv_heads:
        message = f"num_heads {heads} is not divisible by num_kv_heads {kv_heads}"
        report.add("model.attention.num_kv_heads", message, allowed=listing(divisors(heads)))


def heads_divide_width(spec: Spec, report: Report) -> None:
    """Without a head_dim, heads share the model width evenly."""
    width, attention = spec.model.d_model, spec.model.attention
    if attention.head_dim is None and width % attention.num_heads:
        message = f"d_model {width} is not divisible by num_heads {attention.num_heads}, so head_dim has no default"
        report.add("model.attention.num_heads", message, fix="set model.attention.head_dim, or change one of the two")


def rotary_width_is_even(spec: Spec, report: Report) -> None:
    """RoPE rotates pairs."""
    model = spec.model
    rope, known = model.attention.rope, model.attention.head_dim or model.d_model % model.attention.num_heads == 0
    if rope is None or model.attention.mla is not None or not known:
        return
    rotary = model.head_dim * rope.fraction
    if abs(rotary - round(rotary)) > 1e-6 or round(rotary) % 2 or round(rotary) == 0:
        path = "model.attention.rope.fraction" if rope.fraction != 1 else "model.attention.head_dim"
        product = f"head_dim {model.head_dim} × rope.fraction {rope.fraction:g} = {rotary:g}"
        message = f"{product} is no even number of rotated values"
        even = sorted({step / model.head_dim for step in range(2, model.head_dim + 1, 2) if model.head_dim % step == 0})
        fractions = "rope.fraction " + listing(f"{each:g}" for each in even) if even else None
        report.add(path, message, allowed=fractions, fix="change head_dim or rope.fraction, or set rope to null")


def pattern_uses_window(spec: Spec, report: Report) -> None:
    """A window that no layer has is a mistake."""
    window, layers = spec.model.attention.window, spec.model.num_layers
    if window is not None and "L" not in window.pattern[:layers]:
        where = f" among the first {layers}" if "L" in window.pattern else ""
        message = f"no layer has the window of {window.size} tokens: the pattern has no L{where}"
        report.add(
            "model.attention.window.pattern", message, fix="write L for layers with the window, or remove the window"
        )


def layers_have_feed_forward(spec: Spec, report: Report) -> None:
    """A model needs experts, a dense feed-forward, or both, and each must be used."""
    model = spec.model
    if model.dense is None and model.moe is None:
        report.add(
            "model",
            "has neither `moe` nor `dense`: its layers have no feed-forward",
            fix="add model.moe or model.dense",
        )
    elif model.moe is not None and model.dense is not None:
        dense = range(model.num_layers) if model.dense.layers == "all" else model.dense.layers
        if not dense:
            message = "names no layers, so that `dense` has no effect beside `moe`"
            report.add("model.dense", message, fix="list the layers, as in layers: [0], or remove model.dense")
        elif set(range(model.num_layers)) <= set(dense):
            message = f"all {model.num_layers} layers are dense, so that `moe` has no effect"
            report.add("model.dense.layers", message, fix="leave at least one layer out, or set model.moe to null")
    elif model.dense is not None and model.dense.layers not in ((), "all"):
        rest = sorted(set(range(model.num_layers)) - set(model.dense.layers))
        if rest:
            message = f"layers {listing(rest)} have no feed-forward: they are not dense, and there is no `moe`"
            report.add("model.dense.layers", message, fix="write layers: all")


def dense_layers_exist(spec: Spec, report: Report) -> None:
    """Layer numbers count from 0, each once."""
    if spec.model.dense is not None:
        check_layers(spec.model.dense.layers, spec.model.num_layers, "model.dense.layers", report)


def recompute_layers_exist(spec: Spec, report: Report) -> None:
    """Layer numbers count from 0, each once."""
    check_layers(spec.passes.recompute.layers, spec.model.num_layers, "passes.recompute.layers", report)


def check_layers(layers: str | tuple[int, ...], num_layers: int, path: str, report: Report) -> None:
    """Report layers that do not exist, or are named twice."""
    if isinstance(layers, str):
        return
    beyond = sorted({layer for layer in layers if layer >= num_layers})
    if beyond:
        message = f"there is no layer {listing(beyond)} in a model of {num_layers} layers"
        report.add(path, message, allowed=f"0 to {num_layers - 1}")
    twice = sorted({layer for layer in layers if layers.count(layer) > 1})
    if twice:
        report.add(path, f"names layer {listing(twice)} more than once", fix="name each layer once")


def parameters_can_exist(spec: Spec, report: Report) -> None:
    """A spec that asks for an impossible parameter is refused before anything is allocated."""
    model = spec.model
    sizes = [
        (
            "model.vocab_size",
            f"the embedding, vocab_size × d_model = {model.vocab_size} × {model.d_model},",
            model.vocab_size * model.d_model,
        )
    ]
    if model.moe is not None:
        experts, hidden = model.moe.num_experts, model.moe.d_ff
        what = (
            f"a layer's up projection, num_experts × 2 · d_ff × d_model = {experts} × {2 * hidden} × {model.d_model},"
        )
        sizes.append(("model.moe.d_ff", what, experts * 2 * hidden * model.d_model))
    for path, what, size in sizes:
        if size > MAX_ELEMENTS:
            report.add(
                path,
                f"{what} has {size:.1e} values, more than any machine holds",
                allowed="up to 2^48 values in one parameter",
            )


RULES: tuple[Rule, ...] = (
    kv_heads_divide_heads,
    heads_divide_width,
    rotary_width_is_even,
    pattern_uses_window,
    layers_have_feed_forward,
    dense_layers_exist,
    recompute_layers_exist,
    parameters_can_exist,
)
