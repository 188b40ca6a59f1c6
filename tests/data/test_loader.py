"""The sample order and the batches: a function of the step alone, the same for every layout."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from moegraph.data.dataset import TokenDataset
from moegraph.data.loader import Loader, StepBatch, ValidationLoader
from moegraph.data.prepare import Prepared
from moegraph.data.sample_order import SampleOrder
from moegraph.errors import DataError

from .small import write_tokens

SEQ_LEN = 16


def new_loader(prepared: Prepared, *, sequences_per_step: int = 8, seed: int = 3, vocab_size: int = 300) -> Loader:
    return Loader(
        TokenDataset.open(prepared.path),
        seq_len=SEQ_LEN,
        sequences_per_step=sequences_per_step,
        seed=seed,
        document_mask=True,
        vocab_size=vocab_size,
    )


def ids_of(batch: StepBatch, dp: int, count: int, rank: int) -> list[int]:
    parts = [batch.microbatch(rank, dp, index, count)["sample_ids"] for index in range(count)]
    return torch.cat(parts).tolist()


def test_every_sample_comes_once_in_each_epoch() -> None:
    order = SampleOrder(101, seed=7)
    epochs = [order.sample_ids(epoch * 101, 101).tolist() for epoch in range(3)]
    assert all(sorted(epoch) == list(range(101)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert order.sample_ids(90, 150).tolist() == (epochs[0] + epochs[1] + epochs[2])[90:240]
    assert SampleOrder(101, seed=8).sample_ids(0, 101).tolist() != epochs[0]


def test_the_order_is_the_one_that_earlier_runs_had() -> None:
    order = SampleOrder(10, seed=0)
    assert order.sample_ids(0, 10).tolist() == [0, 2, 9, 1, 8, 5, 4, 3, 6, 7]
    assert order.sample_ids(10, 10).tolist() == [5, 3, 7, 8, 2, 4, 1, 0, 6, 9]


@pytest.mark.parametrize(("num_samples", "seed"), [(0, 0), (5, -1), (5, 1 << 64)])
def test_an_impossible_order_is_refused(num_samples: int, seed: int) -> None:
    with pytest.raises(ValueError, match=r"num_samples|seed"):
        SampleOrder(num_samples, seed)


def test_a30_a_run_resumed_at_step_7_sees_the_samples_of_the_uninterrupted_run(prepared: Prepared) -> None:
    whole = new_loader(prepared)
    uninterrupted = [whole.step(step) for step in range(20)]
    resumed = new_loader(prepared)
    for step in range(7, 20):
        batch = resumed.step(step)
        assert torch.equal(batch.tokens, uninterrupted[step].tokens)
        for rank in range(4):
            assert ids_of(batch, 4, 2, rank) == ids_of(uninterrupted[step], 4, 2, rank)
    first = [ids_of(uninterrupted[7], 4, 1, rank) for rank in range(4)]
    assert len({tuple(ids) for ids in first}) == 4


def test_a29_an_epoch_begun_on_4_ranks_and_ended_on_2_sees_each_sample_once(prepared: Prepared) -> None:
    loader = new_loader(prepared)
    steps = loader.num_samples // 8
    seen: list[int] = []
    for step in range(steps):
        dp = 4 if step < steps // 2 else 2
        seen += [sample for rank in range(dp) for sample in ids_of(new_loader(prepared).step(step), dp, 1, rank)]
    assert len(seen) == len(set(seen)) == steps * 8
    rest = loader.sample_ids(steps)[: loader.num_samples - steps * 8].tolist()
    assert sorted(seen + rest) == list(range(loader.num_samples))


def test_the_layout_cuts_the_batch_and_never_changes_it(prepared: Prepared) -> None:
    batch = new_loader(prepared).step(5)
    blocks: dict[int, set[tuple[int, ...]]] = {}
    for dp, count in product((1, 2, 4, 8), (1, 2, 4, 8)):
        if dp * count > 8:
            continue
        parts = [batch.microbatch(rank, dp, index, count) for rank in range(dp) for index in range(count)]
        for name in ("tokens", "labels", "positions", "document_ids", "sample_ids"):
            assert torch.equal(torch.cat([part[name] for part in parts]), getattr(batch, name))
        cut = {tuple(part["sample_ids"].tolist()) for part in parts}
        assert blocks.setdefault(dp * count, cut) == cut
    with pytest.raises(ValueError, match="8 sequences are not divisible by dp 3 × micro-batches 1"):
        batch.microbatch(0, 3)
    with pytest.raises(ValueError, match="rank 2 of 2"):
        batch.microbatch(2, 2)


def test_a_sample_is_the_window_of_the_stream_that_its_id_says(prepared: Prepared) -> None:
    dataset = TokenDataset.open(prepared.path)
    stream = dataset.read(0, dataset.num_tokens)[0]
    batch = new_loader(prepared).step(2)
    for row, sample in enumerate(batch.sample_ids.tolist()):
        window = stream[sample * SEQ_LEN : (sample + 1) * SEQ_LEN + 1]
        assert batch.tokens[row].tolist() == window[:-1].tolist()
        counted = batch.labels[row] != -100
        assert batch.labels[row][counted].tolist() == window[1:][counted.numpy()].tolist()
        assert (batch.tokens[row][~counted] == dataset.eos_id).all()
    assert batch.valid_targets == int((batch.labels != -100).sum()) > 0
    assert new_loader(prepared).num_samples == (len(stream) - 1) // SEQ_LEN


def test_a_step_larger_than_the_data_goes_round(prepared: Prepared) -> None:
    loader = new_loader(prepared, sequences_per_step=1000)
    counts = np.bincount(loader.step(0).sample_ids.numpy(), minlength=loader.num_samples)
    assert counts.max() - counts.min() <= 1
    assert loader.epoch(0) == 0
    assert loader.epoch(1) == 1000 // loader.num_samples


def test_a_vocabulary_smaller_than_the_data_is_refused_with_both_numbers(prepared: Prepared) -> None:
    with pytest.raises(DataError, match=r"ids up to 299, but model\.vocab_size is 256"):
        new_loader(prepared, vocab_size=256)
    new_loader(prepared, vocab_size=512)


def test_data_shorter_than_one_sample_are_refused(tmp_path: Path) -> None:
    dataset = TokenDataset.open(write_tokens(tmp_path / "out", [[5, 6, 7]]))
    with pytest.raises(DataError, match=r"has 4 train tokens, but one sample of data\.seq_len 4 needs 5"):
        Loader(dataset, seq_len=4, sequences_per_step=1, seed=0, document_mask=True, vocab_size=300)


def test_a_step_with_nothing_to_predict_is_refused(tmp_path: Path) -> None:
    dataset = TokenDataset.open(write_tokens(tmp_path / "out", [[5], [6]]))
    loader = Loader(dataset, seq_len=1, sequences_per_step=1, seed=0, document_mask=True, vocab_size=300)
    empty = next(step for step in range(3) if loader.sample_ids(step).item() == 1)
    assert all(loader.step(step).valid_targets == 1 for step in range(3) if step != empty)
    with pytest.raises(DataError, match=f"step {empty} has nothing to predict"):
        loader.step(empty)


def test_validation_is_fixed_and_its_last_batch_is_padded(prepared: Prepared) -> None:
    def batches(per_step: int) -> list[StepBatch]:
        loader = ValidationLoader(
            TokenDataset.open(prepared.path, "validation"),
            seq_len=SEQ_LEN,
            sequences=7,
            sequences_per_step=per_step,
            document_mask=True,
            vocab_size=300,
        )
        return [loader.step(index) for index in range(len(loader))]

    threes, whole = batches(3), batches(7)
    assert [batch.num_sequences for batch in threes] == [3, 3, 3]
    assert threes[2].sample_ids.tolist()[1:] == [-1, -1]
    assert (threes[2].labels[1:] == -100).all()
    assert sum(batch.valid_targets for batch in threes) == whole[0].valid_targets
    assert torch.equal(torch.cat([batch.tokens for batch in threes])[:7], whole[0].tokens)
    assert len(set(whole[0].sample_ids.tolist())) == 7


def test_more_validation_than_there_is_is_refused_with_the_number_there_is(prepared: Prepared) -> None:
    dataset = TokenDataset.open(prepared.path, "validation")
    available = dataset.num_samples(SEQ_LEN)
    with pytest.raises(DataError, match=f"ask for at most {available}"):
        ValidationLoader(
            dataset,
            seq_len=SEQ_LEN,
            sequences=available + 1,
            sequences_per_step=4,
            document_mask=True,
            vocab_size=300,
        )
