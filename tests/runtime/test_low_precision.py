"""The line of a run's log that says what is in 8 bits."""

from __future__ import annotations

import torch

from moegraph.runtime.low_precision import low_precision_text
from tests.small_models import small_spec

CPU = torch.device("cpu")
BF16 = ("precision.compute=bf16", "model.moe.d_ff=32")


def test_it_says_which_products_and_which_rows_and_nothing_where_nothing_is_cast() -> None:
    assert low_precision_text(small_spec(*BF16), CPU) is None
    experts = low_precision_text(small_spec(*BF16, "precision.fp8=rowwise"), CPU)
    assert experts is not None
    assert experts.startswith("precision: experts in fp8 (rowwise), emulated here")
    both = small_spec(*BF16, "precision.mxfp8={experts: 'on', dispatch: 'on'}", "layout={dp: 2, ep: 2}")
    text = low_precision_text(both, CPU)
    assert text is not None
    assert "experts in mxfp8 (on), emulated here" in text
    assert text.endswith("; rows travel to experts in mxfp8 (on)")
    alone = low_precision_text(small_spec(*BF16, "precision.mxfp8.dispatch=auto"), CPU)
    assert alone == "precision: rows travel to experts in mxfp8 (auto), and none does with ep 1"
