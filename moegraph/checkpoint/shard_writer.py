"""Writes the shard file of one rank, at once or in the background.

Contract: a copy in host memory is made once per run and used again for every checkpoint, so a run holds at most one
beside its state. The background thread touches that copy, the file, and nothing else: no collective, no device.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moegraph.checkpoint.file_writer import FileWriter
from moegraph.checkpoint.names import Segment

DTYPE_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16"}  # as safetensors calls them


@dataclass(frozen=True)
class Written:
    """A shard file on disk."""

    bytes: int
    sha256: str


def write_shard(path: Path, tensors: Mapping[Segment, Tensor]) -> Written:
    """Writes one-dimensional host tensors as a safetensors file and flushes it to disk. Raises OSError."""
    # Wider elements first, so that each begins at a multiple of its size.
    ordered = sorted(tensors.items(), key=lambda each: (-each[1].element_size(), each[0].key))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for segment, tensor in ordered:
        begin, end = end, end + tensor.nbytes
        entry = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": [tensor.numel()], "data_offsets": [begin, end]}
        header[segment.key] = entry
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with FileWriter(path) as file:
        file.write(memoryview(len(text).to_bytes(8, "little") + text))
        for _, tensor in ordered:
            content: Any = tensor.detach().view(torch.uint8).numpy()
            file.write(memoryview(content))
    return Written(8 + len(text) + end, file.sha256)


class HostCopy:
    """A copy of tensors in host memory; pinned where they come from a CUDA device."""

    def __init__(self) -> None:
        self._buffers: dict[torch.dtype, Tensor] = {}

    @torch.no_grad()
    def take(self, tensors: Mapping[Segment, Tensor]) -> dict[Segment, Tensor]:
        """Copies them; the result is overwritten by the next call."""
        sizes: dict[torch.dtype, int] = {}
        for tensor in tensors.values():
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.numel()
        on_gpu = any(tensor.device.type == "cuda" for tensor in tensors.values())
        for dtype, size in sizes.items():
            if dtype not in self._buffers or self._buffers[dtype].numel() != size:
                self._buffers[dtype] = torch.empty(size, dtype=dtype, pin_memory=on_gpu)
        copies, ends = {}, dict.fromkeys(sizes, 0)
        for segment, tensor in tensors.items():
            begin = ends[tensor.dtype]
            ends[tensor.dtype] = begin + tensor.numel()
            copy = self._buffers[tensor.dtype][begin : begin + tensor.numel()]
            copies[segment] = copy.copy_(tensor, non_blocking=True)
        if on_gpu:
            torch.cuda.synchronize()
        return copies


class Job:
    """The writing of one shard. `written` or `error` is set once it is done."""

    def __init__(self, path: Path, tensors: Mapping[Segment, Tensor], *, background: bool) -> None:
        self.written: Written | None = None
        self.error: BaseException | None = None
        self._path, self._tensors = path, tensors
        self._thread: threading.Thread | None = None
        if background:
            self._thread = threading.Thread(target=self._write, daemon=True, name="write-checkpoint")
            self._thread.start()
        else:
            self._write()

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Until it is done."""
        if self._thread is not None:
            self._thread.join()

    def _write(self) -> None:
        try:
            self.written = write_shard(self._path, self._tensors)
        except Exception as error:  # whatever it is, the run has to hear of it
            self.error = error
