"""Packing: neither attention nor loss crosses a document boundary."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from moegraph.data.dataset import TokenDataset
from moegraph.data.loader import Loader
from moegraph.data.packing import pack_rows, pad_rows

from .small import write_tokens

# The example of packing.py: a0 a1 a2 eos b0 b1 eos c0.
IDS = np.array([[10, 11, 12, 0, 20, 21, 0, 30]])
STARTS = np.array([[True, False, False, False, True, False, False, True]])


def test_a48_no_target_crosses_the_end_of_a_packed_document() -> None:
    rows = pack_rows(IDS, STARTS, document_mask=True)
    assert rows.tokens.tolist() == [[10, 11, 12, 0, 20, 21, 0]]
    assert rows.labels.tolist() == [[11, 12, 0, -100, 21, 0, -100]]
    assert rows.positions.tolist() == [[0, 1, 2, 3, 0, 1, 2]]
    assert rows.document_ids.tolist() == [[0, 0, 0, 0, 1, 1, 1]]


def test_a48_the_targets_of_two_packed_documents_are_those_of_each_alone(tmp_path: Path) -> None:
    documents = [[10, 11, 12], [20, 21, 22, 23]]

    def targets(name: str, parts: list[list[int]], seq_len: int) -> list[tuple[int, int, int]]:
        dataset = TokenDataset.open(write_tokens(tmp_path / name, [*parts, [99]]))
        loader = Loader(dataset, seq_len=seq_len, sequences_per_step=1, seed=0, document_mask=True, vocab_size=300)
        batch = loader.step(0)
        assert loader.num_samples == 1
        triples = zip(batch.tokens[0].tolist(), batch.positions[0].tolist(), batch.labels[0].tolist(), strict=True)
        return [triple for triple in triples if triple[2] != -100]

    packed = targets("both", documents, 9)
    assert packed == targets("first", documents[:1], 4) + targets("second", documents[1:], 5)
    assert len(packed) == 3 + 4


def test_without_the_mask_every_label_is_the_next_token() -> None:
    rows = pack_rows(IDS, STARTS, document_mask=False)
    assert rows.labels.tolist() == [[11, 12, 0, 20, 21, 0, 30]]
    assert rows.positions.tolist() == [list(range(7))]
    assert rows.document_ids.tolist() == [[0] * 7]


def test_a_row_that_begins_inside_a_document_counts_from_zero() -> None:
    rows = pack_rows(IDS[:, 2:], STARTS[:, 2:], document_mask=True)
    assert rows.positions.tolist() == [[0, 1, 0, 1, 2]]
    assert rows.document_ids.tolist() == [[0, 0, 1, 1, 1]]


def test_packing_equals_a_plain_loop_over_tokens() -> None:
    generator = np.random.default_rng(0)
    ids = generator.integers(1, 50, size=(20, 65))
    starts = generator.random((20, 65)) < 0.15
    rows = pack_rows(ids, starts, document_mask=True)
    for row in range(20):
        document = position = 0
        for place in range(64):
            if place and starts[row, place]:
                document, position = document + 1, 0
            label = -100 if starts[row, place + 1] else ids[row, place + 1]
            expected = (ids[row, place], label, position, document)
            found = (
                rows.tokens[row, place],
                rows.labels[row, place],
                rows.positions[row, place],
                rows.document_ids[row, place],
            )
            assert found == expected
            position += 1


def test_the_types_are_those_of_the_contract_and_padding_predicts_nothing() -> None:
    rows = pad_rows(pack_rows(IDS, STARTS, document_mask=True), 3, 0)
    assert [torch.from_numpy(part).dtype for part in (rows.tokens, rows.labels)] == [torch.int64] * 2
    assert [torch.from_numpy(part).dtype for part in (rows.positions, rows.document_ids)] == [torch.int32] * 2
    assert (rows.labels[1:] == -100).all()
    assert (rows.document_ids[1:] == -1).all()
    assert rows.tokens.shape == (3, 7)
