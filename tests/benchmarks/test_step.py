"""Random batches of `bench step` have the shapes and the documents that the spec asks for."""

from __future__ import annotations

import torch

from moegraph.benchmarks.step import random_batch
from moegraph.specs import load_spec


def test_a_random_batch_has_four_documents_a_row() -> None:
    spec = load_spec("presets/tiny.yaml")
    batch = random_batch(spec, torch.Generator().manual_seed(0))
    rows, length = spec.sequences_per_step, spec.data.seq_len
    assert batch.tokens.shape == (rows, length)
    assert torch.equal(batch.tokens[:, 1:], batch.labels[:, :-1])
    assert batch.document_ids.max() == 3
    assert int(batch.tokens.max()) < spec.model.vocab_size
