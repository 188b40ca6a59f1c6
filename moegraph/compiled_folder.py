"""What a compiled directory (`moegraph.artifact`) says of itself, read and checked; needs no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from moegraph.artifact_names import REPORT_NAME, SPEC_NAME
from moegraph.checkpoint.disk import read_at_most
from moegraph.errors import UsageError

FORMAT, FORMAT_VERSION = "moegraph-compiled", 1
MAX_REPORT_BYTES = 64 << 20


@dataclass(frozen=True)
class CompiledFolder:
    """What a compiled directory says: where its spec lies, and which hash each pass left, in order."""

    path: Path
    hashes: dict[str, str]
    versions: dict[str, str]
    user_passes: dict[str, str]  # pass name → the file it was registered from

    @property
    def spec_path(self) -> Path:
        """The resolved spec."""
        return self.path / SPEC_NAME


def read_compiled(folder: Path) -> CompiledFolder:
    """Reads and checks report.json, for training. Raises UsageError for what is not a compiled directory, and for one
    that holds the graphs of one rank among several."""
    path = folder / REPORT_NAME
    try:
        report = json.loads(read_at_most(path, MAX_REPORT_BYTES))
    except (OSError, ValueError, RecursionError):
        report = None
    if not isinstance(report, dict) or report.get("format") != FORMAT:
        raise UsageError(f"{folder} is not a compiled directory: it has no {REPORT_NAME} of `moegraph compile`")
    if report.get("format_version") != FORMAT_VERSION:
        raise UsageError(f"{path} has another format version than {FORMAT_VERSION}: compile the spec again")
    try:
        hashes = {str(each["name"]): str(each["hash"]) for each in report["passes"]}
        texts = {str(name): str(version) for name, version in report["versions"].items()}
        user_passes = {str(name): str(file) for file, names in report["pass_files"].items() for name in names}
        rank, world = report["rank"], int(report["world"])
    except (TypeError, KeyError, AttributeError, ValueError, OverflowError):
        raise UsageError(f"{path} is damaged: compile the spec again") from None
    if rank is not None and world > 1:
        raise UsageError(
            f"{folder} holds the graphs of rank {rank} of {world} only, and training needs those of all ranks: compile "
            "the spec again without --rank"
        )
    return CompiledFolder(folder, hashes, texts, user_passes)
