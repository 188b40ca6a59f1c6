"""The layout that is proved: that of the spec, or one of another number of ranks that is as near to it as divides."""

from __future__ import annotations

from math import gcd
from typing import Any

from moegraph.specs import load_spec
from moegraph.specs.rules_layout import STAGES_PER_RANK
from moegraph.specs.schema import Layout, Spec
from moegraph.verify.reduce import SEQUENCES


def with_world(spec: Spec, world: int) -> Spec:
    """The spec on `world` ranks; as it is if it has that many.

    The pipeline stays where it divides `world`, the rest is data parallelism. Experts are spread over as many of these
    ranks as divide them, at most as many as the spec has; where the spec does not spread them, over as many as can be,
    with transport padded.
    """
    layout = spec.layout
    if layout.world == world:
        return spec
    pp = layout.pp if world % layout.pp == 0 else 1
    dp = world // pp
    experts = spec.model.moe.num_experts if spec.model.moe is not None else 1
    most = layout.ep if layout.ep > 1 else dp
    ep = max(ranks for ranks in range(1, min(most, dp) + 1) if gcd(dp, experts) % ranks == 0)
    data: dict[str, Any] = spec.model_dump(mode="json", by_alias=True)
    new: dict[str, Any] = data["layout"]
    new.update(dp=dp, ep=ep, pp=pp)
    if pp == 1:
        new["stages"] = None
        new["schedule"] = layout.schedule if STAGES_PER_RANK[layout.schedule] == 1 else "1f1b"
    if ep == 1:
        for name in ("transport", "capacity", "overflow"):
            new[name] = Layout.model_fields[name].default
        data["precision"]["mxfp8"]["dispatch"] = "off"
    elif layout.ep == 1:
        new["transport"] = "padded"
    del data["train"]["schedule"]  # need not fit steps that were cut short by --set
    sequences = min(SEQUENCES, spec.sequences_per_microbatch) * dp * layout.microbatches
    data["train"]["tokens_per_step"] = sequences * spec.data.seq_len
    return load_spec(data)


def layout_text(layout: Layout) -> str:
    """`world 4 = dp 2 × pp 2, ep 2, transport exact, schedule 1f1b`: what is said about a layout."""
    parts = [f"world {layout.world} = dp {layout.dp} × pp {layout.pp}", f"ep {layout.ep}"]
    if layout.ep > 1:
        parts.append(f"transport {layout.transport}")
        parts += [f"capacity {layout.capacity:g}", f"overflow {layout.overflow}"] * (layout.transport != "exact")
    if layout.pp > 1:
        parts.append(f"schedule {layout.schedule}")
    return ", ".join(parts)
