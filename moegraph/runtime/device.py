"""The device of a run, its name, its memory, and the settings that make it repeatable."""

from __future__ import annotations

import os
import platform
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from moegraph._torch_compat import inductor_decides_by_rule
from moegraph.errors import RunError

_CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"  # cuBLAS is only deterministic with a fixed workspace; no API sets it


def choose_device(wanted: str) -> torch.device:
    """`auto` is a CUDA device where there is one, else the CPU. The ranks of a host take one each, by LOCAL_RANK."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise RunError("train.device is cuda, but torch sees no CUDA device here: use auto or cpu")
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    local = os.environ.get("LOCAL_RANK", "")
    if local.isdecimal():
        if int(local) >= torch.cuda.device_count():
            count = torch.cuda.device_count()
            raise RunError(
                f"LOCAL_RANK is {local}, but this host has {count} CUDA devices: one for each rank is needed"
            )
        torch.cuda.set_device(int(local))
    return torch.device("cuda", torch.cuda.current_device())


def device_name(device: torch.device) -> str:
    """The name the driver gives, or the processor's architecture."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"CPU {platform.machine()}"


def peak_memory(device: torch.device) -> int:
    """Peak bytes: allocated on a CUDA device, resident of this process otherwise."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


@contextmanager
def run_settings(deterministic: bool) -> Iterator[None]:
    """Within, torch runs as the spec says; afterwards everything is as it was.

    Deterministic: operators without a deterministic implementation raise, and Inductor chooses no kernel by timing it
    where the choice changes the order of additions, so a run is bitwise repeatable on the same kind of machine and
    versions.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    workspace = os.environ.get(_CUBLAS_WORKSPACE)
    memory: Any = torch.utils.deterministic  # its attribute is made when it is asked for
    fill = memory.fill_uninitialized_memory
    if deterministic:
        os.environ.setdefault(_CUBLAS_WORKSPACE, ":4096:8")
        torch.use_deterministic_algorithms(True)
        memory.fill_uninitialized_memory = False
    try:
        with inductor_decides_by_rule(deterministic):
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory = fill
        if workspace is None:
            os.environ.pop(_CUBLAS_WORKSPACE, None)
