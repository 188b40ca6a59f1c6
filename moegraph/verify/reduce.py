"""A spec made small enough to be proved on a laptop, with every kind of block and every choice kept.

Sizes shrink (widths, heads, experts, vocabulary, sequence); structure does not change: the same layers, norms, router,
groups, window pattern, shared experts, passes, pipeline stages and transport. Experts are spread over fewer ranks, and
buckets get room for any routing, so that no row is lost. A token still leaves experts unchosen
where it did, and heads still share keys where they did. What was made smaller is said in words. The result is loaded
like any other spec, so it honours every rule of the loader.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moegraph.specs import load_spec
from moegraph.specs.schema import Model, Moe, Spec

SEQ_LEN, SEQUENCES, HEAD_DIM, D_MODEL, D_FF, VOCAB = 48, 2, 16, 64, 32, 96
EXPERTS, TOP_K, GROUPS, KV_HEADS, HEADS = 8, 4, 4, 2, 4  # at most this many, where the spec allows
RANKS = 4  # of one expert group
SMALL_ENOUGH = 4_000_000  # elements of the widest parameters of a block

Shrink = Callable[[dict[str, Any], str, int, str], None]


def reduce_spec(spec: Spec, most_ranks: int | None = None) -> tuple[Spec, str]:
    """The spec to verify and what was reduced ("" when nothing was).

    There is one expert group of a few ranks in each stage. With `most_ranks` an expert group may be that large, and the
    number of ranks stays where the group divides it.
    """
    data: dict[str, Any] = spec.model_dump(mode="json", by_alias=True)
    changes: list[str] = []

    def shrink(section: dict[str, Any], key: str, value: int, label: str) -> None:
        if section.get(key) is not None and section[key] > value:
            changes.append(f"{label} {section[key]} → {value}")
            section[key] = value

    if _elements(spec.model) > SMALL_ENOUGH:
        _shrink_model(data["model"], spec.model, shrink)
    sequences = min(SEQUENCES, spec.sequences_per_microbatch)
    shrink(data["data"], "seq_len", SEQ_LEN, "seq_len")
    window = data["model"]["attention"].get("window")
    if window is not None:
        shrink(window, "size", max(data["data"]["seq_len"] // 4, 1), "window")
    del data["train"]["schedule"]  # no graph depends on it, and it need not fit steps that were cut short by --set
    layout = data["layout"]
    experts = data["model"]["moe"]["num_experts"] if spec.model.moe is not None else 1
    ep = _expert_ranks(spec.layout.ep, experts, most_ranks or RANKS)
    shrink(layout, "dp", spec.layout.dp // ep * ep if most_ranks else ep, "dp")
    shrink(layout, "ep", ep, "ep")
    if ep > 1 and spec.layout.transport != "exact" and layout["capacity"] != ep:
        changes.append(f"capacity {spec.layout.capacity:g} → {ep}, so that no bucket overflows")
        layout["capacity"] = ep
    tokens = data["data"]["seq_len"] * sequences * layout["dp"] * spec.layout.microbatches
    shrink(data["train"], "tokens_per_step", tokens, "tokens_per_step")
    return load_spec(data), ", ".join(changes)


def _expert_ranks(ep: int, experts: int, most: int) -> int:
    """The largest group, of at most `most` ranks, that holds so many experts evenly; of at least two ranks if ep is."""
    if ep == 1:
        return 1
    fitting = [ranks for ranks in range(2, experts + 1) if experts % ranks == 0]
    return max((ranks for ranks in fitting if ranks <= min(ep, most)), default=fitting[0])


def _elements(model: Model) -> int:
    """Elements of the widest parameters that one block reads."""
    widest = max(model.vocab_size, 4 * model.attention.num_heads * model.head_dim) * model.d_model
    if model.moe is not None:
        shared = model.moe.shared
        width = model.moe.num_experts * model.moe.d_ff
        width += shared.num_experts * (shared.d_ff or model.moe.d_ff) if shared is not None else 0
        widest = max(widest, 3 * width * model.d_model)
    if model.dense is not None:
        widest = max(widest, 3 * model.dense.d_ff * model.d_model)
    return widest


def _shrink_model(data: dict[str, Any], model: Model, shrink: Shrink) -> None:
    attention = data["attention"]
    attention["head_dim"], attention["num_kv_heads"] = model.head_dim, model.num_kv_heads
    ratio = model.attention.num_heads // model.num_kv_heads
    kv_heads = min(model.num_kv_heads, KV_HEADS if ratio > 1 else HEADS)
    shrink(attention, "head_dim", _head_dim(model), "head_dim")
    shrink(attention, "num_heads", kv_heads * ratio, "num_heads")
    shrink(attention, "num_kv_heads", kv_heads, "num_kv_heads")
    shrink(data, "d_model", D_MODEL, "d_model")
    shrink(data, "vocab_size", VOCAB, "vocab_size")
    if model.dense is not None:
        shrink(data["dense"], "d_ff", 2 * D_FF, "dense.d_ff")
    if model.moe is not None:
        _shrink_moe(data["moe"], model.moe, shrink)


def _head_dim(model: Model) -> int:
    """The smallest width, from HEAD_DIM on, of which rope.fraction is an even number of values."""
    rope = model.attention.rope
    if rope is None:
        return HEAD_DIM

    def fits(width: int) -> bool:
        rotated = width * rope.fraction
        return abs(rotated - round(rotated)) <= 1e-6 and round(rotated) % 2 == 0 and round(rotated) > 0

    return next((width for width in range(HEAD_DIM, model.head_dim) if fits(width)), model.head_dim)


def _shrink_moe(data: dict[str, Any], moe: Moe, shrink: Shrink) -> None:
    shrink(data, "d_ff", D_FF, "moe.d_ff")
    if moe.shared is not None:
        shrink(data["shared"], "d_ff", D_FF, "shared.d_ff")
        shrink(data["shared"], "num_experts", 2, "shared.num_experts")
    every = moe.top_k == moe.num_experts
    top_k = min(moe.top_k, EXPERTS if every else TOP_K)
    experts = min(moe.num_experts, top_k if every else EXPERTS)
    groups = moe.router.groups
    if groups is not None:
        section = data["router"]["groups"]
        count = min(groups.n, GROUPS)
        keep = count if groups.keep == groups.n else max(min(groups.keep, count - 1), 1)
        size = min(moe.num_experts // groups.n, max(EXPERTS // count, -(-top_k // keep), 2))
        top_k, experts = min(top_k, keep * size), count * size
        shrink(section, "n", count, "groups")
        shrink(section, "keep", keep, "groups kept")
    shrink(data, "num_experts", experts, "num_experts")
    shrink(data, "top_k", top_k, "top_k")
