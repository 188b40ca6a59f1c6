"""Writes a trained model as a Hugging Face model directory.

    config.json                                 the architecture, every value explicit
    model.safetensors, or shards with an index  the weights under their published names
    tokenizer.json, tokenizer_config.json       of the data that the model was trained on, if they are still there
    generation_config.json                      the token that ends a text, then

Contract: the directory is written aside and renamed, so it is whole or absent, and a folder that holds anything is
refused. It is renamed only after the hashes of what was read have been compared.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moegraph.checkpoint.disk import sync_folder, write_file
from moegraph.data.output_folder import move_into_place
from moegraph.errors import ExportError
from moegraph.export.architecture import Architecture
from moegraph.export.source import Read, Trained
from moegraph.export.tokenizer import RunTokenizer
from moegraph.export.writer import DEFAULT_SHARD_BYTES, write_weights
from moegraph.specs import Spec
from moegraph.specs.schema.model import Model

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class Exported:
    """What was written: sizes of the weight files by name, and the number of tensors."""

    files: dict[str, int]
    tensors: int


def default_dtype(spec: Spec) -> str:
    """What the graphs of the model read: bfloat16 where it was trained in that, else float32."""
    return "bfloat16" if spec.precision.compute == "bf16" else "float32"


def export_trained(
    trained: Trained,
    architecture: Architecture,
    folder: Path,
    dtype: str,
    tokenizer: RunTokenizer | None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    tick: Callable[[str], None] = lambda name: None,
) -> Exported:
    """Writes `folder`. The model has to be of this architecture. Raises ExportError where the folder holds anything or
    cannot be written, and CheckpointError if the weights are damaged; there is then no such folder."""
    with _new_folder(folder) as partial:
        with trained.reading() as read:
            model = trained.spec.model
            found = write_model(partial, model, architecture, read, dtype, tokenizer, max_shard_bytes, tick)
            tick("comparing hashes")
        return found


def write_model(
    folder: Path,
    model: Model,
    architecture: Architecture,
    read: Read,
    dtype: str,
    tokenizer: RunTokenizer | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    tick: Callable[[str], None] = lambda name: None,
) -> Exported:
    """Fills an empty folder with a model whose parameters `read` gives. Raises OSError."""
    tensors = list(architecture.tensors(model))
    eos = tokenizer.eos_id if tokenizer is not None else None
    ids = {"bos_token_id": None, "eos_token_id": eos, "pad_token_id": None}
    both = {"dtype": dtype, "torch_dtype": dtype}  # loaders know it by one name or the other
    _write_json(folder / "config.json", {**architecture.config(model), **both, **ids})
    if tokenizer is not None:
        _write_json(folder / "generation_config.json", {"_from_model_config": True, **ids})
        write_file(folder / "tokenizer.json", tokenizer.content)
        _write_json(folder / "tokenizer_config.json", tokenizer.config(model.max_seq_len))
    return Exported(write_weights(folder, tensors, read, DTYPES[dtype], max_shard_bytes, tick), len(tensors))


def check_new(folder: Path) -> None:
    """Raises ExportError unless `folder` is absent or an empty folder."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise ExportError(f"{folder} exists and is not a folder: name another one with -o")
    if folder.is_dir() and any(folder.iterdir()):
        raise ExportError(f"{folder} is not empty: name another folder with -o")


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    check_new(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.partial-", dir=folder.parent))
        try:
            yield partial
            partial.chmod(0o755)
            sync_folder(partial)
            check_new(folder)
            move_into_place(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise ExportError(f"{folder} cannot be written: {error.strerror or error}", exit_code=1) from error


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    write_file(path, (json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode())
