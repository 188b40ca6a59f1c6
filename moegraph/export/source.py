"""The weights to export: those of a checkpoint, whose hashes are compared while they are read, or a run's final ones.

A run keeps its final weights as one safetensors file, whose header and shapes are checked; it has no hash of its own.
Where a checkpoint of the same step or a later one is there, that is taken.

Contract: nothing is executed, names and shapes have to be those of the spec, and a read copies only what is asked for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from moegraph.checkpoint.disk import open_file
from moegraph.checkpoint.names import CHECKPOINTS, MANIFEST, parse_step, tensor_name
from moegraph.checkpoint.reader import Checkpoint
from moegraph.checkpoint.restore import check_same_tensors
from moegraph.checkpoint.start import list_steps
from moegraph.checkpoint.step_folders import newest
from moegraph.errors import ExportError
from moegraph.graph.program import Program
from moegraph.lowering import lower
from moegraph.runtime.model_state import master_dtype
from moegraph.runtime.run_log import read_manifest
from moegraph.runtime.weights import WEIGHTS
from moegraph.specs import Spec, load_spec

DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16}

Read = Callable[[str, int, int], Tensor]  # (parameter, first element, how many) → them, one-dimensional, a copy


@dataclass(frozen=True)
class Trained:
    """A trained model on disk. `path`: the checkpoint or the file; `verified`: its content is compared with hashes;
    `reading`: a context that yields a function to read with, and raises on leaving if what was read is damaged."""

    spec: Spec
    step: int
    path: Path
    data_fingerprint: str
    verified: bool
    reading: Callable[[], Any]


def find_trained(path: Path, step: int | None = None) -> Trained:
    """The newest weights of a run, those of one of its steps, or those of a checkpoint named itself.

    Raises ExportError or CheckpointError where there are none, or they are damaged or of another model.
    """
    if not path.is_dir():
        raise ExportError(f"{path} is not a folder: name a run's, or one of its {CHECKPOINTS}/step-…")
    if parse_step(path.name.partition(".")[0]) is not None and (path / MANIFEST).exists():
        found = _from_checkpoint(path)
        if step is not None and step != found.step:
            raise ExportError(f"--step {step}: {path} is a checkpoint of step {found.step}")
        return found
    if step is not None:
        steps = list_steps(path)
        if step not in steps:
            there = ", ".join(map(str, steps)) or "none"
            raise ExportError(f"--step {step}: {path} has no checkpoint of it; there are: {there}")
        return _from_checkpoint(steps[step])
    checkpoint, final = newest(path / CHECKPOINTS) or newest(path), path / WEIGHTS
    if final.exists() or final.is_symlink():
        finished = _final_step(final)
        if checkpoint is None or (parse_step(checkpoint.name.partition(".")[0]) or 0) < finished:
            return _from_final(path, finished)
    if checkpoint is None:
        raise ExportError(f"{path} has neither {WEIGHTS} nor a checkpoint: name the folder of a run")
    return _from_checkpoint(checkpoint)


def _from_checkpoint(folder: Path) -> Trained:
    checkpoint = Checkpoint.open(folder)
    manifest = checkpoint.manifest
    spec = load_spec(manifest.spec)
    program = lower(spec)
    check_same_tensors(program, spec, checkpoint)

    @contextmanager
    def reading() -> Iterator[Read]:
        with checkpoint.verified(manifest.files, ()) as read:

            def values(name: str, start: int, count: int) -> Tensor:
                key = tensor_name("master" if program.parameters[name].trained else "buffer", name)
                out = torch.empty(count, dtype=DTYPES[manifest.tensors[key].dtype])
                read(key, start, out)
                return out

            yield values

    return Trained(spec, manifest.step, folder, manifest.data.fingerprint, True, reading)


def _final_step(path: Path) -> int:
    """The step of a file of final weights."""
    with _opened(path) as file:
        step = (file.metadata() or {}).get("step", "")
    if not step.isascii() or not step.isdigit() or len(step) > 10:
        raise ExportError(f"{path} is not the final weights of a run: its header names no step", exit_code=1)
    return int(step)


def _from_final(run: Path, step: int) -> Trained:
    manifest, path = read_manifest(run), run / WEIGHTS
    data = manifest.get("data")
    fingerprint = str(data.get("fingerprint")) if isinstance(data, Mapping) else ""
    if not isinstance(manifest.get("spec"), Mapping):
        raise ExportError(f"{run / MANIFEST} is not the manifest of a run: it holds no spec", exit_code=1)
    spec = load_spec(manifest["spec"])
    with _opened(path) as file:
        _check_weights(path, file, lower(spec), master_dtype(spec))

    @contextmanager
    def reading() -> Iterator[Read]:
        with _opened(path) as file:

            def values(name: str, start: int, count: int) -> Tensor:
                mapped: Tensor = file.get_tensor(name)  # a view of the file: only what is copied is read
                return mapped.reshape(-1)[start : start + count].clone()

            yield values

    return Trained(spec, step, path, fingerprint, False, reading)


def _check_weights(path: Path, file: Any, program: Program, master: torch.dtype) -> None:
    expected = {
        name: (list(each.global_shape), master if each.trained else each.dtype)
        for name, each in program.parameters.items()
        if each.trained or each.role == "select_bias"
    }
    for name in [*expected, *file.keys()]:
        found = None
        if name in file.keys():  # noqa: SIM118, it is no mapping
            part = file.get_slice(name)
            found = (part.get_shape(), DTYPES.get(part.get_dtype()))
        if found != expected.get(name):
            raise ExportError(f"{path} is not of this run's spec: {name[:200]!a} is {found}, not {expected.get(name)}")


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A safetensors file, whose header the library has checked: sizes, places, no gap, at most 100 MB."""
    try:
        os.close(open_file(path))  # a regular file and no link
        opened = safe_open(path, framework="pt")
    except OSError as error:
        raise ExportError(f"{path} cannot be read: {error.strerror or error}", exit_code=1) from error
    except SafetensorError as error:
        raise ExportError(f"{path} is damaged: {str(error)[:200]}", exit_code=1) from error
    with opened as file:
        yield file
