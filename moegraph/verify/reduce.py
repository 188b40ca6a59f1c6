"""A spec made small enough to be proved on a laptop, with every kind of block and every choice kept.

Sizes shrink (widths, experts, vocabulary, sequence); structure does not: the same layers, norms, router, window
pattern, shared experts and passes. What was made smaller is said in words.
"""

from __future__ import annotations

from typing import Any

from moegraph.specs.schema import Spec

SEQ_LEN, SEQUENCES, HEAD_DIM, D_FF, VOCAB, MOST_EXPERTS, MOST_HEADS = 48, 2, 16, 32, 96, 8, 4
SMALL_ENOUGH = 4_000_000  # elements of the widest block's parameters


def reduce_spec(spec: Spec) -> tuple[Spec, str]:
    """The spec to verify and what was reduced ("" when nothing was)."""
    data: dict[str, Any] = spec.model_dump(by_alias=True)
    changes: list[str] = []

    def shrink(section: dict[str, Any], key: str, value: int, label: str) -> None:
        if section.get(key) is not None and section[key] > value:
            changes.append(f"{label} {section[key]} → {value}")
            section[key] = value

    if _elements(spec) > SMALL_ENOUGH:
        _shrink_model(data["model"], spec, shrink)
    shrink(data["data"], "seq_len", SEQ_LEN, "seq_len")
    window = data["model"]["attention"].get("window")
    if window is not None:
        shrink(window, "size", max(SEQ_LEN // 4, 1), "window")
    tokens = data["data"]["seq_len"] * SEQUENCES * spec.layout.microbatches
    shrink(data["train"], "tokens_per_step", tokens, "tokens_per_step")
    data["train"]["tokens_per_step"] = min(tokens, data["train"]["tokens_per_step"])
    data["layout"].update(dp=1, ep=1, pp=1)
    return Spec.model_validate(data), ", ".join(changes)


def _elements(spec: Spec) -> int:
    model = spec.model
    widest = model.vocab_size * model.d_model
    if model.moe is not None:
        widest = max(widest, 3 * model.moe.num_experts * model.moe.d_ff * model.d_model)
    if model.dense is not None:
        widest = max(widest, 3 * model.dense.d_ff * model.d_model)
    return widest


def _shrink_model(model: dict[str, Any], spec: Spec, shrink: Any) -> None:
    attention, moe = model["attention"], model.get("moe")
    ratio = spec.model.attention.num_heads // spec.model.num_kv_heads
    heads = min(attention["num_heads"], max(MOST_HEADS, ratio) if ratio <= MOST_HEADS else ratio)
    attention["head_dim"] = spec.model.head_dim
    shrink(attention, "head_dim", HEAD_DIM, "head_dim")
    shrink(attention, "num_heads", heads, "num_heads")
    attention["num_kv_heads"] = max(attention["num_heads"] // ratio, 1)
    shrink(model, "d_model", MOST_HEADS * HEAD_DIM, "d_model")
    shrink(model, "vocab_size", VOCAB, "vocab_size")
    if model.get("dense"):
        shrink(model["dense"], "d_ff", 2 * D_FF, "dense.d_ff")
    if not moe:
        return
    shrink(moe, "d_ff", D_FF, "moe.d_ff")
    groups = moe["router"].get("groups")
    if groups is None:
        shrink(moe, "num_experts", MOST_EXPERTS, "num_experts")
        shrink(moe, "top_k", moe["num_experts"], "top_k")
    if moe.get("shared"):
        shrink(moe["shared"], "d_ff", D_FF, "shared.d_ff")
