"""Views of one flat buffer."""

from __future__ import annotations

import pytest
import torch

from moegraph.runtime.flat import FlatTensors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_every_view_starts_at_a_multiple_of_256_bytes(dtype: torch.dtype) -> None:
    tensors = FlatTensors({"a": (3,), "b": (5, 7), "c": (), "d": (64, 64)}, dtype, torch.device("cpu"))
    start = tensors.flat.data_ptr()
    assert [(view.data_ptr() - start) % 256 for view in tensors.values()] == [0, 0, 0, 0]
    assert [tuple(view.shape) for view in tensors.values()] == [(3,), (5, 7), (), (64, 64)]


def test_views_do_not_overlap_and_share_the_flat_buffer() -> None:
    tensors = FlatTensors({"a": (3,), "b": (65,), "c": (2, 2)}, torch.float32, torch.device("cpu"))
    for number, view in enumerate(tensors.values(), start=1):
        view.fill_(number)
    assert [view.unique().tolist() for view in tensors.values()] == [[1.0], [2.0], [3.0]]
    assert float(tensors.flat.sum()) == 3 * 1 + 65 * 2 + 4 * 3
