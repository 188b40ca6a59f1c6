"""How fast checkpoints are written and read here, beside what the disk does with the same bytes.

    disk       the bytes written from memory with plain writes, and flushed: the rate that a save is held against
    save       the shard file of a checkpoint of as many bytes: written, hashed and flushed
    load       opened and read into memory, with and without the hashes compared; not in the system's memory before
    copy       of the state to host memory with `mode: async`, into memory that is made once and used again: a CPU's
               training waits for it, a GPU's goes on meanwhile as far as the next commit
    beside     steps of matrix products, on all threads of a CPU or on the GPU, alone and while a save goes on behind
               them: each ends with what a commit waits for, and with a read by the host

Each is the least of `rounds` turns, disk and save in turn, since a disk's rate changes.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from moegraph.checkpoint.disk import free_bytes
from moegraph.checkpoint.manifest import manifest_json
from moegraph.checkpoint.names import MANIFEST, Segment, shard_name, step_name
from moegraph.checkpoint.piece_hash import PIECE
from moegraph.checkpoint.reader import Checkpoint
from moegraph.checkpoint.shard_writer import HostCopy, Job, Written, write_shard
from moegraph.errors import RunError
from moegraph.runtime.device import device_name

_CPU = torch.device("cpu")
_PARTS = 24  # tensors: masters and both moments of a few parameters
_SIDE = {"cpu": 1024, "cuda": 8192}  # of the matrices that are multiplied beside a save
_STEP = {"cpu": 0.05, "cuda": 0.5}  # seconds of products to a step, about


@dataclass(frozen=True)
class CheckpointTiming:
    """Seconds. `bytes`: of the checkpoint; `device`: of the state that is copied and of the steps; `step`: of matrix
    products alone; `step_beside` and `step_longest`: the mean and the longest while a save is written behind them."""

    bytes: int
    threads: int
    device: str
    disk: float
    save: float
    load: float
    load_verified: float
    copy: float
    step: float
    step_beside: float
    step_longest: float

    @property
    def save_share(self) -> float:
        """The save's rate, as a share of the disk's own."""
        return self.disk / self.save

    @property
    def verify_more(self) -> float:
        """What comparing hashes adds to a load, as a share of it."""
        return self.load_verified / self.load - 1

    @property
    def stall_share(self) -> float:
        """How long the copy for an asynchronous save takes, as a share of a save that is not."""
        return self.copy / self.save

    def to_json(self) -> dict[str, Any]:
        """As JSON-able data."""
        shares = {"save_share": self.save_share, "verify_more": self.verify_more, "stall_share": self.stall_share}
        return {**asdict(self), **shares}


def time_checkpoint(
    folder: Path, size: int, rounds: int, progress: Callable[[str], None], device: torch.device = _CPU
) -> CheckpointTiming:
    """Writes and reads `size` bytes in a folder of its own below `folder`, `rounds` times, and removes them. State and
    steps beside a save are on `device`.

    Raises RunError where they do not fit, twice.
    """
    if free_bytes(folder) < 2 * size + (1 << 30):
        raise RunError(f"{folder} has not the room for two times {size / 2**30:g} GiB: name another folder, or fewer")
    tensors = _tensors(size)
    place = Path(tempfile.mkdtemp(prefix="moegraph-bench-", dir=folder))
    best: dict[str, float] = {}
    try:
        for turn in range(1, rounds + 1):
            progress(f"turn {turn} of {rounds}")
            _turn(place, tensors, best)
        progress("saving beside matrix products")
        state = {segment: tensor.to(device) for segment, tensor in tensors.items()}
        copy = HostCopy()
        best["copy"] = _copy(copy, state, rounds)
        best.update(_beside(place, copy, state, device))
    except OSError as error:
        raise RunError(f"{place} cannot be written to or read ({error.strerror or error})") from error
    finally:
        shutil.rmtree(place, ignore_errors=True)
    total, name = sum(tensor.nbytes for tensor in tensors.values()), device_name(device)
    return CheckpointTiming(total, torch.get_num_threads(), name, **best)


def _tensors(size: int) -> dict[Segment, Tensor]:
    """Bytes that no file system can pack, as masters and moments."""
    elements = size // 4 // _PARTS
    words = torch.randint(-(1 << 31), 1 << 31, (elements,), dtype=torch.int32)
    found = {}
    for part in range(_PARTS):
        kind = ("master", "exp_avg", "exp_avg_sq")[part % 3]
        name = f"{kind}.layers.{part // 3}.moe.w_up"
        found[Segment(name, 0, elements)] = words.add(part).view(torch.float32)
    return found


def _turn(place: Path, tensors: dict[Segment, Tensor], best: dict[str, float]) -> None:
    def least(name: str, work: Callable[[], object]) -> Any:
        began = time.perf_counter()
        result = work()
        seconds = time.perf_counter() - began
        best[name] = min(best.get(name, seconds), seconds)
        return result

    plain, folder = place / "plain", place / step_name(1)
    least("disk", lambda: _write_plainly(plain, tensors))
    plain.unlink()
    folder.mkdir()
    path = folder / shard_name(0, 1)
    written = least("save", lambda: write_shard(path, tensors))
    _write_manifest(folder, tensors, written)
    out = {segment: torch.empty_like(tensor) for segment, tensor in tensors.items()}
    for tensor in out.values():
        tensor.zero_()  # so that its memory is there
    for name, verify in (("load", False), ("load_verified", True)):
        _forget(path)
        least(name, lambda verify=verify: _load(folder, out, verify=verify))  # type: ignore[misc]
    wrong = [s.tensor for s, t in tensors.items() if not torch.equal(t.view(torch.int32), out[s].view(torch.int32))]
    if wrong:
        raise RunError(f"{wrong[0]} was read otherwise than it was written: this disk is not to be trusted")
    shutil.rmtree(folder)


def _write_plainly(path: Path, tensors: dict[Segment, Tensor]) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        for tensor in tensors.values():
            content: Any = tensor.view(torch.uint8).numpy()
            view = memoryview(content)
            while view:
                view = view[os.write(handle, view[:PIECE]) :]
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_manifest(folder: Path, tensors: dict[Segment, Tensor], written: Written) -> None:
    numbers = dict.fromkeys(("loss", "loss_total", "balance_loss", "z_loss", "grad_norm", "lr"), 1.0)
    content = {
        "run": "0" * 32,
        "step": 1,
        "saved": "",
        "layout": {"dp": 1, "ep": 1, "pp": 1, "schedule": "1f1b"},
        "data": {"fingerprint": "0" * 64, "seed": 0, "samples": 0, "epoch": 0},
        "counters": {"optimizer_steps": 1, "replays": 0, "capacity": None},
        "numbers": {**numbers, "valid_targets": 1, "expert_counts": []},
        "spec": {},
        "graph_hashes": {},
        "versions": {},
        "tensors": {segment.tensor: {"shape": [tensor.numel()], "dtype": "F32"} for segment, tensor in tensors.items()},
        "files": {shard_name(0, 1): {"bytes": written.bytes, "sha256": written.sha256}},
    }
    (folder / MANIFEST).write_bytes(manifest_json(content))


def _load(folder: Path, out: dict[Segment, Tensor], *, verify: bool) -> None:
    checkpoint = Checkpoint.open(folder)
    with checkpoint.verified(list(checkpoint.manifest.files) if verify else [], out) as read:
        for segment in checkpoint.in_file_order(out):
            read(segment.tensor, segment.start, out[segment])


def _forget(path: Path) -> None:
    """What the system's memory has of a file goes, where it can be asked to."""
    handle = os.open(path, os.O_RDONLY)
    try:
        with suppress(AttributeError, OSError):
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)


def _copy(copy: HostCopy, state: dict[Segment, Tensor], rounds: int) -> float:
    best = float("inf")
    for turn in range(rounds + 1):
        began = time.perf_counter()
        copy.begin(state)
        copy.wait()
        if turn:  # the first makes its memory
            best = min(best, time.perf_counter() - began)
    return best


def _beside(place: Path, copy: HostCopy, state: dict[Segment, Tensor], device: torch.device) -> dict[str, float]:
    """Seconds of steps alone, and while a save is written in the background."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    a = torch.ones(_SIDE[device.type], _SIDE[device.type], device=device, dtype=dtype)

    def step(products: int) -> float:
        began = time.perf_counter()
        for _ in range(products):
            b = a @ a
        copy.hold()
        b[0, 0].item()
        return time.perf_counter() - began

    step(3)
    products = max(1, round(3 * _STEP[device.type] / min(step(3) for _ in range(3))))
    alone = [step(products) for _ in range(max(2, round(1 / _STEP[device.type])))]
    path, beside = place / shard_name(0, 1), []
    job = None
    while job is None or not job.done:
        began = time.perf_counter()
        if job is None:
            job = Job(path, copy.begin(state), background=True, ready=copy.wait)
        step(products)
        beside.append(time.perf_counter() - began)
    job.wait()
    path.unlink()
    if job.error is not None:
        raise job.error
    return {"step": fmean(alone), "step_beside": fmean(beside), "step_longest": max(beside)}
