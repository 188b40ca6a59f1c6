"""Final weights of a run: one safetensors file of the masters under their names in the model."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from moegraph.errors import RunError

WEIGHTS = "model.safetensors"


def save_weights(folder: Path, weights: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Path:
    """Writes `model.safetensors` aside, flushes it to disk and renames it: a reader finds it whole or not at all."""
    target = folder / WEIGHTS
    try:
        handle, partial = tempfile.mkstemp(prefix=f".{WEIGHTS}.", dir=folder)
    except OSError as error:
        raise RunError(f"the weights could not be written to {target}: {error}") from error
    os.close(handle)
    try:
        save_file({n: t.detach().cpu().contiguous().clone() for n, t in weights.items()}, partial, dict(metadata))
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        os.chmod(partial, 0o644)
        os.replace(partial, target)
    except (OSError, SafetensorError) as error:
        raise RunError(f"the weights could not be written to {target}: {error}") from error
    finally:
        with suppress(FileNotFoundError):
            os.unlink(partial)
    return target
