"""The manifest of a run: what it takes to say later what was run, with what, on which data."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FORMAT = "moegraph-run"
FORMAT_VERSION = 1
_PACKAGES = ("moegraph", "torch", "triton", "numpy", "pydantic", "tokenizers", "safetensors", "tensorboard")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages a run depends on, those that are installed, without importing them."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit and cleanness of the git work tree that `folder` lies in, or None outside of one."""

    def git(*command: str) -> str:
        done = subprocess.run(("git", *command), cwd=folder, capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "clean": not git("status", "--porcelain", "--untracked-files=no")}
    except (OSError, subprocess.SubprocessError):
        return None


def build_manifest(
    *,
    resolved_spec: Mapping[str, Any],
    graph_hashes: Mapping[str, str],
    data: Mapping[str, Any],
    parameters: tuple[int, int],
    flops_per_token: float,
    device: str,
    tuning_tables: Mapping[str, str],
    overlap_seconds: Mapping[str, float],
    resumed_from: int = 0,
    folder: Path,
) -> dict[str, Any]:
    """The manifest as JSON-able values.

    resolved_spec: every final value. graph_hashes: by pass and kind. data: source and fingerprint. parameters: (total,
    active). flops_per_token: training operations. device: its name. tuning_tables: the
    SHA-256 of each table that its kernels' configurations come from. overlap_seconds: of a compute phase with
    overlapped communication on and off, where a run measured both. resumed_from: the step that it started after.
    folder: where git is asked for the state of code.
    """
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "spec": dict(resolved_spec),
        "graph_hashes": dict(graph_hashes),
        "data": dict(data),
        "parameters": {"total": parameters[0], "active": parameters[1]},
        "flops_per_token": flops_per_token,
        "device": device,
        "tuning_tables": dict(tuning_tables),
        "overlap_seconds": dict(overlap_seconds),
        "resumed_from": resumed_from,
        "platform": platform.platform(),
        "versions": versions(),
        "git": git_state(folder),
    }
