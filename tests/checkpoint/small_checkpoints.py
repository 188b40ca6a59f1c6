"""Checkpoints without a training run, for tests of what is on disk; and runs that save some."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moegraph.checkpoint.manifest import ITEM_BYTES, manifest_json
from moegraph.checkpoint.names import MANIFEST, Segment, shard_name, step_name
from moegraph.checkpoint.reader import Checkpoint
from moegraph.checkpoint.shard_header import read_header
from moegraph.checkpoint.shard_writer import write_shard
from moegraph.compiled import Compiled
from moegraph.runtime.mesh import join
from moegraph.runtime.progress import Progress
from moegraph.runtime.run_log import read_records
from moegraph.runtime.trainer import Trainer
from moegraph.specs.schema import Spec
from tests.parallel.steps import compiled_once, layout_spec

CPU = torch.device("cpu")


def content(step: int = 7) -> dict[str, Any]:
    """What a manifest says besides tensors and files."""
    numbers = dict.fromkeys(("loss", "loss_total", "balance_loss", "z_loss", "grad_norm", "lr"), 0.5)
    return {
        "run": "0" * 32,
        "step": step,
        "saved": "2026-01-01T00:00:00+0000",
        "layout": {"dp": 2, "ep": 1, "pp": 1, "schedule": "1f1b"},
        "data": {"fingerprint": "a" * 64, "seed": 0, "samples": 28, "epoch": 0},
        "counters": {"optimizer_steps": step, "replays": 0, "capacity": None},
        "numbers": {**numbers, "valid_targets": 64, "expert_counts": [[3, 1], [2, 2]]},
        "spec": {"model": {"d_model": 8}, "train": {"steps": 10}},
        "graph_hashes": {"canonicalize": "0"},
        "versions": {"torch": "2"},
    }


TENSORS = {"master.layers.0.weight": (4, 6), "exp_avg.layers.0.weight": (4, 6), "buffer.layers.0.bias": (5,)}


def values() -> dict[str, Tensor]:
    """The tensors of `write_checkpoint`, whole."""
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) for name, shape in TENSORS.items()}


def write_checkpoint(root: Path, step: int = 7, cut: int = 10) -> Path:
    """A whole checkpoint of three tensors in two shards; the larger two are cut after `cut` elements."""
    folder = root / step_name(step)
    folder.mkdir(parents=True)
    shards: list[dict[Segment, Tensor]] = [{}, {}]
    for name, value in values().items():
        flat = value.reshape(-1)
        end = min(cut, flat.numel())
        shards[0][Segment(name, 0, end)] = flat[:end]
        if end < flat.numel():
            shards[1][Segment(name, end, flat.numel())] = flat[end:]
    files = {shard_name(rank, 2): write_shard(folder / shard_name(rank, 2), each) for rank, each in enumerate(shards)}
    entries = {
        "tensors": {name: {"shape": list(shape), "dtype": "F32"} for name, shape in TENSORS.items()},
        "files": {name: {"bytes": each.bytes, "sha256": each.sha256} for name, each in files.items()},
    }
    (folder / MANIFEST).write_bytes(manifest_json({**content(step), **entries}))
    return folder


def rewrite(folder: Path, **changes: object) -> None:
    """Changes the manifest and makes its fingerprint right again."""
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    kept = {key: each for key, each in manifest.items() if key not in ("format", "version", "fingerprint")}
    (folder / MANIFEST).write_bytes(manifest_json({**kept, **changes}))


def flip_bit(folder: Path, tensor: str, element: int = 0) -> None:
    """The lowest bit of one element of a tensor in a checkpoint; hashes are made right again."""
    files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
    flipped = 0
    for name, entry in files.items():
        for segment, dtype, offset in read_header(folder / name, entry["bytes"]):
            if segment.tensor == tensor and segment.start <= element < segment.stop:
                content = bytearray((folder / name).read_bytes())
                content[offset + (element - segment.start) * ITEM_BYTES[dtype]] ^= 1
                (folder / name).write_bytes(content)
                entry["sha256"] = sha256(content).hexdigest()
                flipped += 1
    assert flipped == 1
    rewrite(folder, files=files)


def whole(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, read as a whole."""
    dtypes = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16}
    checkpoint = Checkpoint.open(folder)
    found = {}
    for name, entry in checkpoint.manifest.tensors.items():
        flat = torch.empty(entry.numel, dtype=dtypes[entry.dtype])
        checkpoint.read(name, 0, flat)
        found[name] = flat.view(entry.shape)
    return found


def run_spec(folder: Path, *overrides: str, **layout: Any) -> Spec:
    """A float64 model with experts and selection biases on the `tokens` data, that saves every step into
    `folder`/run."""
    given = ["data.source=tokens", "model.vocab_size=300", f"train.output_dir={folder / 'run'}", "checkpoint.every=1"]
    return layout_spec(*given, "checkpoint.keep_last=100", *overrides, **layout)


@dataclass
class Ran:
    """What a run left, on its first rank: the sample ids of each step that this process trained, the losses by step of
    the whole log, and what was said."""

    ids: dict[int, list[int]] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    printed: str = ""


def train_rank(rank: int, spec: Spec, base: Path) -> Ran:
    """Trains as one rank of the layout, to the end of the spec."""
    stream = io.StringIO()
    with join(spec.layout, rank, spec.layout.world, CPU) as mesh:
        trainer = Trainer(spec, base, CPU, Progress(spec.train.steps, stream=stream), compiled_for(spec), mesh)
        ids = record_ids(trainer)
        trainer.run()
    if rank:
        return Ran()
    records = read_records(Path(spec.train.output_dir))
    return Ran(ids, {record["step"]: record["loss"] for record in records}, stream.getvalue())


def compiled_for(spec: Spec) -> Compiled:
    """The compiled spec; those that differ in steps, folder or checkpoints only are compiled once."""
    train = spec.train.model_copy(update={"steps": 1, "output_dir": "runs"})
    key = spec.model_copy(update={"checkpoint": type(spec.checkpoint)(), "train": train})
    return replace(compiled_once(key.model_dump_json(by_alias=True)), spec=spec)


def record_ids(trainer: Trainer) -> dict[int, list[int]]:
    """Fills up, while the trainer runs, with the sample ids of each step, counted from 1."""
    ids: dict[int, list[int]] = {}
    original = trainer.loader.step

    def step(number: int) -> Any:
        batch = original(number)
        ids[number + 1] = batch.sample_ids.tolist()
        return batch

    trainer.loader.step = step  # type: ignore[method-assign]
    return ids
