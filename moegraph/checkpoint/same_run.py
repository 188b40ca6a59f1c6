"""Whether a checkpoint can be continued with a spec, and what is different.

What a run *is* has to be equal, with defaults filled in on both sides, since an older moegraph did not record what it
did not know: the model, the precision of its masters and moments, and everything that decides which
samples a step sees. How it is run is free: layout, passes, compiler, device, what is logged and saved. Whatever else
differs, such as a learning rate, is meant, and said.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from moegraph.checkpoint.manifest import Manifest
from moegraph.errors import CheckpointError
from moegraph.specs.nodes import show, show_name
from moegraph.specs.schema import Spec

EQUAL = (
    "model",
    "precision",
    "data.seq_len",
    "data.document_mask",
    "train.seed",
    "train.tokens_per_step",
    "train.optimizer.kind",
    "train.optimizer.moments",
)
FREE = (
    "layout",
    "passes",
    "checkpoint",
    "data.source",
    "train.compile",
    "train.device",
    "train.deterministic",
    "train.log_every",
    "train.output_dir",
    "train.check_replicas",
    "train.validation",
)
_ABSENT = object()


def check_same_run(folder: Path, manifest: Manifest, spec: Spec, fingerprint: str) -> list[str]:
    """The differences that are meant, as `path: then → now`. `fingerprint`: of the training data.

    Raises CheckpointError (exit status 2) with every difference that may not be.
    """
    now = spec.model_dump(mode="json", by_alias=True)
    recorded = _with_defaults(manifest.spec, type(spec))
    found = [each for each in _differences(recorded, now) if not _below(each[0], FREE)]
    wrong = [f"{path}: {_change(then, value)}" for path, then, value in found if _below(path, EQUAL)]
    if fingerprint != manifest.data.fingerprint:
        wrong.append(f"data.source: {spec.data.source} holds other data than it was trained on (by their fingerprint)")
    if manifest.step > spec.train.steps:
        wrong.append(f"train.steps: it is at step {manifest.step}, and {spec.train.steps} are asked for")
    if wrong:
        raise CheckpointError(
            f"{folder} is a checkpoint of another run:\n    " + "\n    ".join(wrong) + "\n    fix: use the spec that "
            "wrote it, or start anew with --set checkpoint.resume=off",
            exit_code=2,
        )
    meant = [f"{path}: {_change(then, value)}" for path, then, value in found]
    if meant and manifest.step == spec.train.steps:
        raise CheckpointError(
            f"{folder} is of the last step, so there is nothing left to train, but the spec is another one:\n    "
            + "\n    ".join(meant)
            + "\n    fix: raise train.steps, or start anew with --set checkpoint.resume=off",
            exit_code=2,
        )
    return meant


def _with_defaults(recorded: Mapping[str, Any], schema: type[Spec]) -> Mapping[str, Any]:
    """The recorded spec, with what the schema has gained since at its defaults, which is what was done then; as it is
    where it is no spec of this schema."""
    try:
        filled = schema.model_validate_json(json.dumps(recorded), strict=True)
    except (ValueError, RecursionError):
        return recorded
    return filled.model_dump(mode="json", by_alias=True)


def differences(then: Any, now: Any) -> list[tuple[str, str]]:
    """What two resolved specs, as data, say differently: (path, `then → now`)."""
    return [(path, _change(*change)) for path, *change in _differences(then, now)]


def _below(path: str, roots: tuple[str, ...]) -> bool:
    return any(path == root or path.startswith(f"{root}.") for root in roots)


def _differences(then: Any, now: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(then, Mapping) and isinstance(now, Mapping):
        for key in dict.fromkeys([*now, *then]):
            below = f"{path}.{show_name(str(key))}" if path else show_name(str(key))
            yield from _differences(then.get(key, _ABSENT), now.get(key, _ABSENT), below)
    elif type(then) is not type(now) or then != now:
        yield path, then, now


def _change(then: Any, now: Any) -> str:
    return " → ".join("nothing" if each is _ABSENT else show(each) for each in (then, now))
