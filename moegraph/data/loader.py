"""Batches for training and validation: the same global batch for every layout, known from the step alone.

Legend: B sequences of a step, S sequence length. A sample is a window: sample i is tokens [i·S, i·S + S) of the
stream, with the next token of each as its label. What is left at the end of the stream, less than a window, is dropped.

Contract: `Loader.step(n)` depends on the data, the seed, B, S and n, and on nothing else: no state to save, none to
restore. Every rank builds the same `StepBatch`, and takes its share by `microbatch`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from moegraph.data.dataset import TokenDataset
from moegraph.data.packing import IGNORED_LABEL, PackedRows, pack_rows, pad_rows
from moegraph.data.sample_order import SampleOrder
from moegraph.errors import DataError

PADDING_SAMPLE = -1


@dataclass(frozen=True)
class StepBatch:
    """All sequences of one optimizer step, over all ranks and micro-batches.

    tokens, labels int64 [B, S] (label −100: nothing to predict); positions, document_ids int32 [B, S] (document −1:
    padding); sample_ids int64 [B] (−1: padding). `valid_targets` is the number of labels that count.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    positions: torch.Tensor
    document_ids: torch.Tensor
    sample_ids: torch.Tensor
    valid_targets: int

    @property
    def num_sequences(self) -> int:
        """B."""
        return self.tokens.shape[0]

    def microbatch(self, dp_rank: int = 0, dp: int = 1, index: int = 0, count: int = 1) -> dict[str, torch.Tensor]:
        """Micro-batch `index` of `count` of data-parallel rank `dp_rank` of `dp`: every tensor, as a view.

        The B sequences are cut into dp · count equal blocks, rank by rank; all layouts with one value of dp · count
        make the same blocks, and the union of the blocks is always the whole batch. Raises ValueError if B is not a
        multiple of dp · count.
        """
        if not (0 <= dp_rank < dp and 0 <= index < count):
            raise ValueError(f"rank {dp_rank} of {dp}, micro-batch {index} of {count}: out of range")
        size, rest = divmod(self.num_sequences, dp * count)
        if rest:
            raise ValueError(f"{self.num_sequences} sequences are not divisible by dp {dp} × micro-batches {count}")
        first = (dp_rank * count + index) * size
        block = slice(first, first + size)
        return {
            "tokens": self.tokens[block],
            "labels": self.labels[block],
            "positions": self.positions[block],
            "document_ids": self.document_ids[block],
            "sample_ids": self.sample_ids[block],
        }


class _WindowReader:
    """Reads windows of a dataset by sample id and packs them."""

    def __init__(self, dataset: TokenDataset, seq_len: int, document_mask: bool, vocab_size: int) -> None:
        if dataset.vocab_size > vocab_size:
            raise DataError(
                f"{dataset.path} has ids up to {dataset.vocab_size - 1}, but model.vocab_size is {vocab_size}: "
                f"set model.vocab_size to {dataset.vocab_size} or more, or prepare the data with a smaller tokenizer"
            )
        self.dataset, self.seq_len, self.document_mask = dataset, seq_len, document_mask
        self.num_samples = dataset.num_samples(seq_len)
        if self.num_samples < 1:
            raise DataError(
                f"{dataset.path} has {dataset.num_tokens} {dataset.split} tokens, "
                f"but one sample of data.seq_len {seq_len} needs {seq_len + 1}: prepare more text, or lower it"
            )

    def rows(self, sample_ids: NDArray[np.int64]) -> PackedRows:
        """The packed windows of the samples, in order."""
        shape = (len(sample_ids), self.seq_len + 1)
        ids, starts = np.empty(shape, dtype=np.int64), np.empty(shape, dtype=np.bool_)
        for row, sample in enumerate(sample_ids.tolist()):
            ids[row], starts[row] = self.dataset.read(sample * self.seq_len, self.seq_len + 1)
        return pack_rows(ids, starts, document_mask=self.document_mask)


class Loader:
    """Training batches of a dataset.

    `sequences_per_step` is B, over all ranks; `vocab_size` is the model's, at least the data's. Raises DataError when
    the data do not fit the vocabulary or hold not one sample.
    """

    def __init__(
        self,
        dataset: TokenDataset,
        *,
        seq_len: int,
        sequences_per_step: int,
        seed: int,
        document_mask: bool,
        vocab_size: int,
    ) -> None:
        _require_positive(seq_len=seq_len, sequences_per_step=sequences_per_step)
        self._reader = _WindowReader(dataset, seq_len, document_mask, vocab_size)
        self._order = SampleOrder(self._reader.num_samples, seed)
        self.sequences_per_step = sequences_per_step

    @property
    def num_samples(self) -> int:
        """Samples of one epoch."""
        return self._reader.num_samples

    def sample_ids(self, step: int) -> NDArray[np.int64]:
        """The samples of step `step` (from 0), int64 [B], without reading them."""
        return self._order.sample_ids(step * self.sequences_per_step, self.sequences_per_step)

    def epoch(self, step: int) -> int:
        """The epoch, from 0, that step `step` begins in."""
        return step * self.sequences_per_step // self.num_samples

    def step(self, step: int) -> StepBatch:
        """The global batch of step `step`, counted from 0. Raises DataError when no label of it counts."""
        sample_ids = self.sample_ids(step)
        batch = _to_batch(self._reader.rows(sample_ids), sample_ids)
        if batch.valid_targets == 0:
            raise DataError(f"step {step} has nothing to predict: raise data.seq_len or train.tokens_per_step")
        return batch


class ValidationLoader:
    """A fixed set of sequences, spread evenly over a split, in batches of one shape.

    The last batch is filled up with rows of padding, which have no label that counts. Raises DataError when the split
    holds fewer than `sequences` samples.
    """

    def __init__(
        self,
        dataset: TokenDataset,
        *,
        seq_len: int,
        sequences: int,
        sequences_per_step: int,
        document_mask: bool,
        vocab_size: int,
    ) -> None:
        _require_positive(seq_len=seq_len, sequences=sequences, sequences_per_step=sequences_per_step)
        self._reader = _WindowReader(dataset, seq_len, document_mask, vocab_size)
        available = self._reader.num_samples
        if sequences > available:
            raise DataError(
                f"train.validation.sequences is {sequences}, but the {dataset.split} split of {dataset.path} holds "
                f"{available} of length {seq_len}: ask for at most {available}, or prepare a larger split"
            )
        self.sample_ids = np.arange(sequences, dtype=np.int64) * available // sequences
        self.sequences_per_step = sequences_per_step

    def __len__(self) -> int:
        """Number of batches."""
        return -(-len(self.sample_ids) // self.sequences_per_step)

    def step(self, index: int) -> StepBatch:
        """Batch `index`, from 0 to len − 1. Its `valid_targets` may be 0 in the extreme."""
        if not 0 <= index < len(self):
            raise ValueError(f"batch {index} is outside [0, {len(self)})")
        count = self.sequences_per_step
        sample_ids = self.sample_ids[index * count : (index + 1) * count]
        rows = pad_rows(self._reader.rows(sample_ids), count, self._reader.dataset.eos_id)
        filler = np.full(count - len(sample_ids), PADDING_SAMPLE, dtype=np.int64)
        return _to_batch(rows, np.concatenate([sample_ids, filler]))


def _to_batch(rows: PackedRows, sample_ids: NDArray[np.int64]) -> StepBatch:
    return StepBatch(
        tokens=torch.from_numpy(rows.tokens),
        labels=torch.from_numpy(rows.labels),
        positions=torch.from_numpy(rows.positions),
        document_ids=torch.from_numpy(rows.document_ids),
        sample_ids=torch.from_numpy(sample_ids),
        valid_targets=int((rows.labels != IGNORED_LABEL).sum()),
    )


def _require_positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{name} {value} is not positive")
