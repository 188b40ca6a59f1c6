"""Writes the shard file of one rank, at once or in the background.

Contract: a copy in host memory is made once per run and used again for every checkpoint, so a run holds at most one
beside its state. The background thread touches that copy, the file, and nothing else: no collective, no device, but for
the end of the copying, which it waits for.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
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
        self._stream: torch.cuda.Stream | None = None
        self._copied: torch.cuda.Event | None = None

    @torch.no_grad()
    def begin(self, tensors: Mapping[Segment, Tensor]) -> dict[Segment, Tensor]:
        """Begins to copy them; the result is overwritten by the next call. From a CUDA device the copying goes on
        beside what is launched next: `wait` before the copy is read, `hold` before the tensors change."""
        sizes: dict[torch.dtype, int] = {}
        for tensor in tensors.values():
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.numel()
        device = next((tensor.device for tensor in tensors.values() if tensor.device.type == "cuda"), None)
        for dtype, size in sizes.items():
            if dtype not in self._buffers or self._buffers[dtype].numel() != size:
                self._buffers[dtype] = torch.empty(size, dtype=dtype, pin_memory=device is not None)
        copies, ends = {}, dict.fromkeys(sizes, 0)
        for segment, tensor in tensors.items():
            begin = ends[tensor.dtype]
            ends[tensor.dtype] = begin + tensor.numel()
            copies[segment] = self._buffers[tensor.dtype][begin : begin + tensor.numel()]
        if device is None:
            _copy(copies, tensors)
            return copies
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            _copy(copies, tensors)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()
        return copies

    @property
    def complete(self) -> bool:
        """Whether the copy that was begun last is there."""
        return self._copied is None or bool(self._copied.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Until the copy is complete."""
        if self._copied is not None:
            self._copied.synchronize()

    def hold(self) -> None:
        """What is launched on this stream from now on waits, on the device, until the copy is complete."""
        if self._copied is not None:
            assert self._stream is not None
            torch.cuda.current_stream(self._stream.device).wait_event(self._copied)


def _copy(copies: Mapping[Segment, Tensor], tensors: Mapping[Segment, Tensor]) -> None:
    for segment, tensor in tensors.items():
        copies[segment].copy_(tensor, non_blocking=True)


class Job:
    """The writing of one shard, once `ready` has returned. `written` or `error` is set when it is done."""

    def __init__(
        self,
        path: Path,
        tensors: Mapping[Segment, Tensor],
        *,
        background: bool,
        ready: Callable[[], None] = lambda: None,
    ) -> None:
        self.written: Written | None = None
        self.error: BaseException | None = None
        self._path, self._tensors, self._ready = path, tensors, ready
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
            self._ready()
            self.written = write_shard(self._path, self._tensors)
        except Exception as error:  # whatever it is, the run has to hear of it
            self.error = error
