"""The data of a run: its dataset, the loader of its steps, and that of its validation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moegraph.data.corpora import resolve_source
from moegraph.data.dataset import TokenDataset
from moegraph.data.loader import Loader, ValidationLoader
from moegraph.specs.schema import Spec


def open_data(spec: Spec, base: Path) -> tuple[TokenDataset, Loader, ValidationLoader | None]:
    """What `data.source`, relative to `base`, holds; the last is None without `train.validation`. Raises DataError."""
    path = resolve_source(spec.data.source, base)
    dataset = TokenDataset.open(path)
    common: dict[str, Any] = {
        "seq_len": spec.data.seq_len,
        "document_mask": spec.data.document_mask,
        "vocab_size": spec.model.vocab_size,
    }
    loader = Loader(dataset, sequences_per_step=spec.sequences_per_step, seed=spec.train.seed, **common)
    if spec.train.validation is None:
        return dataset, loader, None
    held_out = TokenDataset.open(path, split="validation")
    sequences = spec.train.validation.sequences
    size = spec.sequences_per_microbatch
    return dataset, loader, ValidationLoader(held_out, sequences=sequences, sequences_per_step=size, **common)
