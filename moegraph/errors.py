"""Every error that moegraph raises on purpose.

Contract: each error says in one sentence what is wrong and what to do about it, and carries the exit status that the
command line ends with (`exit_code`: 1 the run failed, 2 the spec or the call is wrong, 3 a check did not hold) and a
stable `code`. Codes: MG1xx spec, MG2xx layout, MG3xx data, MG4xx checkpoint, MG5xx numerics, MG6xx communication.
Imports nothing heavy: the command line reads this before it knows what it has to do.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

# What a problem's code means. A code is never reused for another meaning.
PROBLEM_CODES = {
    "MG101": "the spec file cannot be found or read",
    "MG102": "the spec is not YAML 1.2 as moegraph reads it",
    "MG103": "unknown key",
    "MG104": "missing key",
    "MG105": "value of the wrong kind, or out of range",
    "MG106": "two values that contradict each other",
    "MG107": "waits for later work",
    "MG108": "larger or deeper than a spec may be",
    "MG109": "a path that leaves the folder it is confined to",
    "MG110": "a malformed override",
    "MG201": "a layout whose numbers do not divide",
    "MG202": "a pipeline schedule that cannot run so",
}


MOST_SHOWN = 50  # problems of one spec, on a terminal


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a spec: where it stands, what it is, and what would do."""

    code: str
    message: str
    where: str = ""  # file:line:column, or `--set key=value`
    path: str = ""  # spec path, such as model.moe.top_k
    value: str | None = None  # as it would be written in YAML, cut to one line
    allowed: str | None = None
    nearest: str | None = None
    fix: str | None = None
    file: str = ""
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        subject = self.path + (f" = {self.value}" if self.value is not None and self.path else "")
        if self.where == f"--set {self.path}={self.value}":
            subject = ""
        head = ": ".join(part for part in (self.where, subject, self.message) if part)
        lines = [f"{head} [{self.code}]"]
        lines += [f"    allowed: {self.allowed}"] if self.allowed else []
        lines += [f"    fix: {self.fix}"] if self.fix else []
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """The problem as JSON-able values; line and column count from 1, 0 where there is no file."""
        return {
            "code": self.code,
            "file": self.file,
            "line": self.line,
            "column": self.column,
            "where": self.where,
            "path": self.path,
            "value": self.value,
            "message": self.message,
            "allowed": self.allowed,
            "nearest": self.nearest,
            "fix": self.fix,
        }


class MoegraphError(Exception):
    """Base of all errors with a message for the user; everything else is a fault of moegraph itself."""

    exit_code: int = 1
    code: str = "MG000"

    def to_json(self) -> dict[str, Any]:
        """The error as JSON-able values."""
        return {"error": type(self).__name__, "code": self.code, "exit_code": self.exit_code, "message": str(self)}


class SpecError(MoegraphError):
    """A spec that cannot be used. `problems` holds all that is wrong with it; `str()` is the text of the first 50."""

    exit_code = 2
    code = "MG100"

    def __init__(self, problems: Iterable[Problem], subject: str = "the spec") -> None:
        self.problems: list[Problem] = list(problems)
        self.subject = subject
        if not self.problems:
            raise AssertionError("a SpecError needs at least one problem")
        count = "1 problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        lines = [f"{count} in {subject}", *map(str, self.problems[:MOST_SHOWN])]
        if len(self.problems) > MOST_SHOWN:
            lines.append(f"… and {len(self.problems) - MOST_SHOWN} more; --json has them all")
        super().__init__("\n".join(lines))

    def to_json(self) -> dict[str, Any]:
        """The error as JSON-able values, every problem with its parts."""
        return {**super().to_json(), "subject": self.subject, "problems": [each.to_json() for each in self.problems]}


class UsageError(MoegraphError):
    """A command or function was called in a way that cannot work."""

    exit_code = 2
    code = "MG110"


class DataError(MoegraphError):
    """Training data that is missing, changed, or does not fit the spec (`exit_code` 2 when the call is at fault)."""

    code = "MG301"

    def __init__(self, message: str, *, code: str = "MG301", exit_code: int = 1) -> None:
        super().__init__(message)
        self.code = code
        self.exit_code = exit_code


class CheckpointError(MoegraphError):
    """A checkpoint that is damaged, cannot be written, or is of another run (`exit_code` 2 when the call is at fault, 3
    when a check was asked for)."""

    code = "MG401"

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class ExportError(MoegraphError):
    """A model that cannot be written in another format: no published architecture computes it, or its files are not
    there or cannot be written (`exit_code` 1)."""

    exit_code = 2
    code = "MG402"

    def __init__(self, message: str, *, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class RunError(MoegraphError):
    """A run that started and could not go on."""

    code = "MG501"


class CheckFailed(MoegraphError):
    """Something that was to be proved does not hold."""

    exit_code = 3
    code = "MG502"
