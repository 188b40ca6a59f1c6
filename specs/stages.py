"""The text of `layout.stages`: which blocks each pipeline stage runs.

    "embedding,0-3|4-7,head"      two stages: embedding and layers 0 to 3; layers 4 to 7 and the head

Stages are separated by `|`, their parts by `,`. A part is `embedding`, `head`, a layer, or a range of layers. Every
block stands once and in order, and no stage is empty.
"""

from __future__ import annotations

import re
from itertools import pairwise

_LAYERS = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


def stage_of_block(text: str, num_layers: int) -> tuple[int, ...]:
    """The stage of each block, in the order embedding, layer 0 … layer num_layers - 1, head.

    Raises ValueError with a sentence for a text that does not name every block once and in order.
    """
    stages: list[int] = []
    for stage, parts in enumerate(text.split("|")):
        if not parts.strip():
            raise ValueError(f"stage {stage} is empty")
        for part in parts.split(","):
            first, last = _positions(part.strip(), num_layers)
            if first < len(stages):
                raise ValueError(f"{_name(first, num_layers)} stands twice")
            if first > len(stages):
                missing = _span(len(stages), first - 1, num_layers)
                raise ValueError(f"{missing} should stand before {_name(first, num_layers)}")
            stages += [stage] * (last - first + 1)
    if len(stages) < num_layers + 2:
        raise ValueError(f"{_span(len(stages), num_layers + 1, num_layers)} missing at the end")
    return tuple(stages)


def even_stages(num_layers: int, stages: int) -> str:
    """A text that gives every stage as many layers as any other, give or take one; stages is at most num_layers."""
    ends = [num_layers * stage // stages for stage in range(stages + 1)]
    parts = [f"{a}-{b - 1}" if b - a > 1 else str(a) for a, b in pairwise(ends)]
    return f"embedding,{'|'.join(parts)},head"


def _positions(part: str, num_layers: int) -> tuple[int, int]:
    """The first and the last block that a part names, by their place in the model."""
    if part == "embedding":
        return 0, 0
    if part == "head":
        return num_layers + 1, num_layers + 1
    match = _LAYERS.fullmatch(part)
    if match is None:
        raise ValueError(f"{part[:40]!r} is not embedding, head, a layer or a range of layers such as 0-3")
    first, last = int(match[1]), int(match[2] or match[1])
    if first > last:
        raise ValueError(f"the range {part} goes backwards")
    if last >= num_layers:
        raise ValueError(f"there is no layer {last} in a model of {num_layers} layers (0 to {num_layers - 1})")
    return first + 1, last + 1


def _name(position: int, num_layers: int) -> str:
    if position == 0:
        return "embedding"
    return "head" if position > num_layers else f"layer {position - 1}"


def _span(first: int, last: int, num_layers: int) -> str:
    names = _name(first, num_layers), _name(last, num_layers)
    return names[0] if first == last else f"{names[0]} to {names[1]}"
