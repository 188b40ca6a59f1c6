"""Whether a published architecture computes what a model of a spec computes: a rule for each setting.

Contract: an architecture has rules for the settings that it leaves open or demands. Every other setting of `model` must
have its default, so that a setting which is added to the schema later is refused, never dropped. Settings that change
training only are left out. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic_core import PydanticUndefined

from moegraph.specs.nodes import show
from moegraph.specs.schema.attention import Window
from moegraph.specs.schema.base import Section
from moegraph.specs.schema.model import Dense, Model
from moegraph.specs.schema.moe import RouterNorm, SharedExperts

TRAINING_ONLY = frozenset({"init", "moe.balance", "moe.router.bias_update_rate"})


@dataclass(frozen=True)
class Rule:
    """`holds(value, model)`: whether the architecture computes that; `has`: what it computes, for people."""

    holds: Callable[[Any, Model], bool]
    has: str


Rules = Mapping[str, Rule]


def only(*values: Any) -> Rule:
    """One of these values."""
    return Rule(lambda value, model: value in values, " or ".join(_shown(value) for value in values))


FREE = Rule(lambda value, model: True, "any")
REQUIRED = Rule(lambda value, model: value is not None, "one")
EVEN_HEADS = Rule(
    lambda value, model: model.head_dim * model.attention.num_heads == model.d_model, "d_model / num_heads"
)
SAME_AS_QKV = Rule(lambda value, model: value == model.attention.qkv_bias, "the same as qkv_bias")


def _norm(*kinds: str, eps: float = 0.0) -> Rule:
    def holds(value: RouterNorm, model: Model) -> bool:
        return value.kind in kinds and (value.kind == "none" or (value.eps, value.mode) == (eps, "add"))

    said = {"none": "none", "sum": f"kind sum with eps {eps:g}"}
    return Rule(holds, " or ".join(said[kind] for kind in kinds))


SUM, SUM_OR_NONE = _norm("sum"), _norm("none", "sum")
SUM_PLUS_TINY = _norm("none", "sum", eps=1e-20)


def window(*, every_layer: bool) -> Rule:
    """No sliding window or, on every layer or in any pattern, one of any size with the rotary embedding of the rest."""

    def holds(value: Window | None, model: Model) -> bool:
        if value is None:
            return True
        sizes = {model.window(layer) for layer in range(model.num_layers)}
        return value.rope is None and (not every_layer or sizes == {value.size})

    return Rule(holds, "none, or one for all layers" if every_layer else "none, or one with the rope of other layers")


def shared(*, gate: str, whole: bool = False, optional: bool = False) -> Rule:
    """Shared experts with this gate; `whole`: their width is a multiple of the experts'."""

    def holds(value: SharedExperts | None, model: Model) -> bool:
        if value is None:
            return optional
        return value.gate == gate and not (whole and shared_width(model) % _experts(model).d_ff)

    text = f"shared experts with gate {gate}" + (" of a multiple of the experts' d_ff" if whole else "")
    return Rule(holds, ("none, or " if optional else "") + text)


def _first_layers(value: Dense | None, model: Model) -> bool:
    found = dense_layers(model)
    return found == list(range(len(found)))


FIRST_LAYERS_DENSE = Rule(_first_layers, "none, or the first layers")


def dense_layers(model: Model) -> list[int]:
    """The layers with an ordinary feed-forward."""
    return [layer for layer in range(model.num_layers) if model.is_dense(layer)]


def shared_width(model: Model) -> int:
    """The width of all shared experts together; 0 without."""
    moe = _experts(model)
    return moe.shared.num_experts * (moe.shared.d_ff or moe.d_ff) if moe.shared is not None else 0


def _experts(model: Model) -> Any:
    assert model.moe is not None
    return model.moe


ROTARY_FRACTION = Rule(
    lambda value, model: int(model.head_dim * value) == round(model.head_dim * value), "any that is exact in float64"
)

# What every architecture leaves open.
COMMON: Rules = {
    "vocab_size": FREE,
    "d_model": FREE,
    "num_layers": FREE,
    "max_seq_len": FREE,
    "norm.eps": FREE,
    "tie_embeddings": FREE,
    "attention.num_heads": FREE,
    "attention.num_kv_heads": FREE,
    "attention.head_dim": EVEN_HEADS,
    "attention.rope": REQUIRED,
    "attention.rope.theta": FREE,
    "moe.num_experts": FREE,
    "moe.top_k": FREE,
    "moe.d_ff": FREE,
}


def misfits(model: Model, rules: Rules) -> list[str]:
    """A sentence for each setting of a model in canonical form that does not hold, in the order of the schema."""
    return list(_misfits(model, "", model, {**COMMON, **rules}))


def _misfits(section: Section, prefix: str, model: Model, rules: Rules) -> Iterator[str]:
    for name, field in type(section).model_fields.items():
        path, value = f"{prefix}{name}", getattr(section, name)
        if path in TRAINING_ONLY:
            continue
        rule = rules.get(path)
        inside = isinstance(value, Section) and any(each.startswith(f"{path}.") for each in rules)
        if rule is None and not inside:
            default = field.get_default(call_default_factory=True)
            assert default is not PydanticUndefined, f"{path} is of every model: it needs a rule"
            rule = only(default)
        if rule is not None and not rule.holds(value, model):
            yield f"model.{path} is {_shown(value)}, and it has {rule.has}"
        elif inside:
            yield from _misfits(value, f"{path}.", model, rules)


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    return show(value.model_dump(mode="json") if isinstance(value, Section) else value)
