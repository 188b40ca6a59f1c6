"""What a trace is, and its file: one JSON document, `digests` of a call a run of 16 hex digits per node of its graph.

Contract: a trace file may come from another machine. Its size is capped, its JSON strict, its schema closed and typed,
and every call has to be of a graph and a block that the file has.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from moegraph.checkpoint.disk import write_file
from moegraph.checkpoint.manifest import read_small_file
from moegraph.errors import CheckpointError, RunError, UsageError
from moegraph.kernels.strict_json import Refused, parse

FORMAT: Final = "moegraph-trace"
VERSION: Final = 1
MAX_BYTES = 1 << 30
DIGITS = 16
NONE = "-" * DIGITS  # of a node that holds no value

Count = Annotated[int, Field(ge=0, le=1 << 31)]
Digests = Annotated[str, Field(pattern=r"\A[0-9a-f\-]*\z")]
Digest = Annotated[str, Field(pattern=r"\A[0-9a-f]{16}\z")]
Real = Annotated[float, Field(allow_inf_nan=False)]


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Node(_Closed):
    """A node of a graph: its name, what it does, dtype and shape, the layer node it comes from, forward or backward,
    the pass that made it, and for an input that is a weight, its name in the block."""

    name: str
    operation: str
    value: str
    layer: str
    direction: str
    made_by: str
    parameter: str | None = None


class GraphCall(_Closed):
    """A call of a graph. `place` counts blocks; `microbatch` is null for what is made of weights alone."""

    microbatch: Count | None
    place: Count
    kind: str
    graph: str
    digests: Digests

    @property
    def label(self) -> str:
        """The graph's key in `Trace.graphs`."""
        return f"{self.kind}/{self.graph}"

    def digest(self, index: int) -> str:
        """That of a node, or NONE."""
        return self.digests[DIGITS * index : DIGITS * (index + 1)]


class RankTrace(_Closed):
    """What one rank saw, in its order; and of what it has, by parameter: the optimizer's moments that the step found,
    its gradients, and the weights that it left."""

    graphs: dict[str, list[Node]]
    calls: list[GraphCall]
    moments: dict[str, Digest]
    gradients: dict[str, Digest]
    weights: dict[str, Digest]


class Block(_Closed):
    """A block of the model: its prefix, and its parameters' names in the model."""

    prefix: str
    parameters: dict[str, str]


class Trace(_Closed):
    """A step of a run on all its ranks. Loss in nats per token and gradient norm are null where they are not finite;
    `start` is the step of the checkpoint it was computed from, 0 for the run's start."""

    format: Literal["moegraph-trace"]
    version: Literal[1]
    run: str
    start: Count
    step: Count
    loss: Real | None
    grad_norm: Real | None
    data: str
    device: str
    versions: dict[str, str]
    spec: dict[str, Any]
    blocks: list[Block]
    ranks: Annotated[list[RankTrace], Field(min_length=1)]

    @property
    def nodes(self) -> int:
        """Digests of nodes, over all ranks."""
        return sum(len(call.digests) // DIGITS for rank in self.ranks for call in rank.calls)


def write_trace(trace: Trace, path: Path) -> None:
    """Writes or replaces the file. Raises RunError."""
    content = trace.model_dump_json().encode() + b"\n"
    if len(content) > MAX_BYTES:
        raise RunError(
            f"the trace of this step has {len(content)} bytes, more than {MAX_BYTES}: use fewer micro-batches"
        )
    try:
        write_file(path, content)
    except OSError as error:
        raise RunError(f"{path} cannot be written ({error.strerror or error})") from error


def read_trace(path: Path) -> Trace:
    """The trace in a file. Raises UsageError, which names the file and what is wrong."""
    try:
        value = parse(read_small_file(path, MAX_BYTES))
    except (CheckpointError, Refused) as error:
        raise UsageError(f"{path} is not a trace: {error}") from error
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise UsageError(f"{path} is not a trace: its format is not {FORMAT}; `--save` writes one")
    if value.get("version") != VERSION:
        shown = str(value.get("version"))[:20]
        raise UsageError(
            f"{path} is a trace of version {shown}, and this moegraph reads {VERSION}: trace again with it"
        )
    try:
        trace = Trace.model_validate(value)
    except (ValidationError, RecursionError) as error:
        raise UsageError(f"{path} is damaged: {_first_problem(error)}") from error
    if not isinstance(trace.spec.get("layout"), dict):
        raise UsageError(f"{path} is damaged: its spec has no layout")
    for rank in trace.ranks:
        for number, call in enumerate(rank.calls):
            nodes = rank.graphs.get(call.label)
            if nodes is None or call.place >= len(trace.blocks) or len(call.digests) != DIGITS * len(nodes):
                raise UsageError(
                    f"{path} is damaged: call {number} of {call.label[:80]!r} is not of its graphs and blocks"
                )
    return trace


def rank_to_bytes(rank: RankTrace) -> bytes:
    """For the way to the first rank."""
    return rank.model_dump_json().encode()


def rank_from_bytes(content: bytes) -> RankTrace:
    """As another rank sent it."""
    return RankTrace.model_validate(json.loads(content))


def _first_problem(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return "it is nested too deeply"
    first = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(str(part)[:80] for part in first['loc'])[:200]}: {first['msg'][:200]}"
