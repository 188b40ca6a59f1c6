"""What things are called in a folder of checkpoints.

    RUN/checkpoints/latest                                      the name of the newest one, for people and scripts
    RUN/checkpoints/step-000120/manifest.json                   step, spec, sizes and hashes
    RUN/checkpoints/step-000120/shard-00000-of-00002.safetensors    what rank 0 of 2 kept

A *tensor* of a checkpoint is whole, and named by what it is of which parameter: `master.layers.1.moe.experts.up`. Its
elements are counted in the order of memory, experts by their global index. A *segment* is a run of them; a shard file
holds segments, each as a one-dimensional tensor called `master.layers.1.moe.experts.up[4096:8192]`.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

CHECKPOINTS, LATEST, MANIFEST = "checkpoints", "latest", "manifest.json"
Kind = Literal["master", "exp_avg", "exp_avg_sq", "buffer"]
MAX_ELEMENTS = 1 << 48

TENSOR_PATTERN = r"(?:master|exp_avg|exp_avg_sq|buffer)\.[A-Za-z0-9_.\-]{1,512}"
SHARD_PATTERN = r"shard-[0-9]{5}-of-[0-9]{5}\.safetensors"
_KEY = re.compile(rf"({TENSOR_PATTERN})\[([0-9]{{1,15}}):([0-9]{{1,15}})\]", re.ASCII)
_STEP = re.compile(r"step-([0-9]{6,10})", re.ASCII)


class Segment(NamedTuple):
    """Elements `start` to `stop` of a tensor, flattened."""

    tensor: str
    start: int
    stop: int

    @property
    def key(self) -> str:
        """Its name in a shard file."""
        return f"{self.tensor}[{self.start}:{self.stop}]"


def parse_key(key: str) -> Segment | None:
    """The segment that a name in a shard file says, or None if it says none."""
    found = _KEY.fullmatch(key)
    if found is None:
        return None
    segment = Segment(found[1], int(found[2]), int(found[3]))
    return segment if segment.start < segment.stop and segment.key == key else None


def tensor_name(kind: Kind, parameter: str) -> str:
    """The name of what is kept of a parameter or buffer."""
    return f"{kind}.{parameter}"


def shard_name(rank: int, world: int) -> str:
    """The file of a rank."""
    return f"shard-{rank:05d}-of-{world:05d}.safetensors"


def step_name(step: int) -> str:
    """The folder of a step."""
    return f"step-{step:06d}"


def parse_step(name: str) -> int | None:
    """The step whose folder is called so, or None."""
    found = _STEP.fullmatch(name)
    return int(found[1]) if found is not None and step_name(int(found[1])) == name else None
