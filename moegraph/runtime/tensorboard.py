"""TensorBoard scalars of a run, where TensorBoard is installed; nothing depends on it.

Every number of a record becomes a scalar under its path (`router/layers.1/load_max`); lists are left out.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any


class TensorBoard:
    """Writes event files into `folder`/tensorboard from the first record on. Any failure is told to `trouble` and ends
    the writing, never the run. `installed` says whether anything is written at all."""

    def __init__(self, folder: Path, trouble: Callable[[Exception], None]) -> None:
        self.installed = importlib.util.find_spec("tensorboard") is not None
        self._folder = folder / "tensorboard"
        self._trouble = trouble
        self._writer: Any = None
        self._off = not self.installed

    def write(self, record: Mapping[str, Any]) -> None:
        """Adds the scalars of one record."""
        if self._off:
            return
        try:
            if self._writer is None:
                self._writer = _open(self._folder)
            for tag, value in scalars(record):
                self._writer.add_scalar(tag, value, record["step"])
        except Exception as error:  # whatever an optional package raises is not a reason to stop training
            self._off = True
            self._trouble(error)

    def close(self) -> None:
        """Writes out what is left."""
        self._off = True
        if self._writer is not None:
            try:
                self._writer.close()
            except Exception as error:
                self._trouble(error)
            self._writer = None


def scalars(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """(tag, value) of every number in a record but its step."""
    for key, value in record.items():
        if isinstance(value, Mapping):
            yield from scalars(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool) and (prefix or key != "step"):
            yield f"{prefix}{key}", float(value)


def _open(folder: Path) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder))
