"""audit.jsonl: what each step of a run computed, each line bound to all before it by a hash.

    {"step": 0, "data": fingerprint, "seed": 0, "previous": "00…", "digest": "…"}
    {"step": 1, "loss": 5.7, "grad_norm": 1.2, "counts": sha256, "samples": sha256, "previous": …, "digest": …}

Contract: `digest` is the SHA-256 of the line without it, as JSON with sorted keys, and `previous` the digest of the
line before. So a line that was changed, removed or put in breaks the chain there, and the last digest stands for the
whole run. `counts` hashes the choices per expert [MoE layers, E], `samples` the sample ids [B], both as little-endian
int64. A number that is not finite is its name; a skipped step has `"skipped": true`. Checkpoints keep the digest of
their step. A run that goes on drops the lines of steps that it trains again. This is for finding what differs, not for
proof against who can write the file: who can, can make a whole new chain.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from moegraph.checkpoint.disk import read_lines
from moegraph.errors import CheckFailed, UsageError

AUDIT = "audit.jsonl"
_NOTHING = "0" * 64
_LONGEST = 1 << 16  # bytes of a line
_COMPARED = ("samples", "loss", "grad_norm", "counts", "skipped")  # in the order in which a step makes them


def step_facts(record: Mapping[str, Any], counts: Sequence[Sequence[int]], samples: torch.Tensor) -> dict[str, Any]:
    """The facts of a step: `record` has step, loss, grad_norm and perhaps skipped; `counts` [MoE layers][E]; `samples`
    int64 [B]."""
    numbers = {name: _said(record[name]) for name in ("loss", "grad_norm")}
    skipped = {"skipped": True} if "skipped" in record else {}
    flat = torch.tensor([count for row in counts for count in row], dtype=torch.int64)
    return {"step": record["step"], **numbers, **skipped, "counts": _sha256(flat), "samples": _sha256(samples)}


def linked(facts: Mapping[str, Any], previous: str) -> dict[str, Any]:
    """A line of the chain after one with the digest `previous`."""
    line = {**facts, "previous": previous}
    return {**line, "digest": _digest(line)}


def read_chain(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's chain, each checked. Raises UsageError where there is none, CheckFailed (exit status 3) that
    names the first line at which it is broken. Half a line at the end, which a killed run leaves, is no line."""
    path, lines = folder / AUDIT, []
    previous = None
    for number, text in enumerate(_lines(path), 1):
        try:
            line = json.loads(text)
            whole = isinstance(line, dict) and type(line.get("step")) is int and isinstance(line.get("previous"), str)
            right = whole and line["digest"] == _digest({k: v for k, v in line.items() if k != "digest"})
        except (ValueError, KeyError, RecursionError):
            right = False
        if not right:
            raise CheckFailed(f"{path}:{number} is not what was written: its digest is wrong")
        if previous is not None and (line["previous"], line["step"]) != (previous["digest"], previous["step"] + 1):
            raise CheckFailed(f"{path}:{number}, step {line['step']}, does not follow the line before it")
        lines.append(line)
        previous = line
    return lines


def first_difference(recorded: Mapping[str, Any], found: Mapping[str, Any]) -> str | None:
    """The first fact of a step that differs, with both values."""
    for name in _COMPARED:
        if recorded.get(name) != found.get(name):
            return f"{name} was {recorded.get(name)}, and is {found.get(name)}"
    return None


class Audit:
    """Writes the chain of a run in `folder`. What cannot be written is said once through `warn`, and ends nothing."""

    def __init__(self, folder: Path, warn: Callable[[str], None]) -> None:
        self.path, self._warn, self._warned = folder / AUDIT, warn, False
        self.digest = _NOTHING

    def begin(self, step: int, digest: str | None, data: str, seed: int) -> None:
        """Goes on after `step`, whose digest a checkpoint kept, or begins anew. Later lines are dropped."""
        kept: list[str] = []
        try:
            chain = read_chain(self.path.parent) if step else []
            kept = [json.dumps(line) for line in chain if line["step"] <= step]
            self.digest = next((line["digest"] for line in chain if line["step"] == step), _NOTHING)
        except (CheckFailed, UsageError) as error:
            if digest is not None and isinstance(error, CheckFailed):
                self._warn(f"{error}; a new chain begins at step {step}")
            self.digest = _NOTHING
        if not step or self.digest == _NOTHING or (digest is not None and digest != self.digest):
            first = linked({"step": step, "data": data, "seed": seed}, digest or _NOTHING)
            kept, self.digest = [json.dumps(first)], first["digest"]
        self._try(lambda: self._replace("".join(f"{line}\n" for line in kept)))

    def add(self, facts: Mapping[str, Any]) -> None:
        """Appends a step."""
        line = linked(facts, self.digest)
        self.digest = line["digest"]
        self._try(lambda: self._append(json.dumps(line) + "\n"))

    def _append(self, text: str) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(text)

    def _replace(self, text: str) -> None:
        partial = self.path.with_name(f".{AUDIT}.partial")
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, self.path)

    def _try(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            if not self._warned:
                self._warned = True
                self._warn(f"{self.path} cannot be written ({error.strerror or error}); training goes on without")


def _lines(path: Path) -> Iterator[str]:
    try:
        for line in read_lines(path, _LONGEST):
            if line.endswith(b"\n"):
                yield line.decode("utf-8", errors="replace")
    except OSError as error:
        if error.errno is None:
            raise CheckFailed(f"{path} is not what was written: {error}") from error
        raise UsageError(f"{path.parent} has no {AUDIT} that can be read ({error.strerror or error})") from error


def _digest(line: Mapping[str, Any]) -> str:
    text = json.dumps(line, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _sha256(values: torch.Tensor) -> str:
    return hashlib.sha256(values.to(torch.int64).numpy().astype("<i8").tobytes()).hexdigest()


def _said(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
